"""The names and functions of expressions, and where each may be used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dsl.expr.tree import Type

BUILT_INS: Mapping[str, Type] = MappingProxyType(
    {
        "q": "int32",
        "kv": "int32",
        "h": "int32",
        "kv_head": "int32",
        "b": "int32",
        "q_token": "int32",
        "kv_token": "int32",
        "q_len": "int32",
        "kv_len": "int32",
        "score": "float",
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"head": "h", "seq": "b"})
CONSTANTS = ("true", "false", "causal")
FUNCTIONS = ("softcap", "alibi", "min", "max", "abs", "exp", "log", "tanh", "sqrt", "where")

NAMES_OF_FIELD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mask": tuple(name for name in BUILT_INS if name != "score"),
        "score": tuple(BUILT_INS),
        "sink": ("h", "b"),
        "scale": (),
    }
)
