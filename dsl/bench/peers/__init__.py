"""Peers: what a user would run instead of our function, found where it is installed. Importing this imports no peer."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsl.bench.peers.work import Peer

_PREFILL, _BOTH, _DECODE = ("prefill",), ("prefill", "decode"), ("decode",)


@dataclass(frozen=True, slots=True)
class Known:
    """Which file of this package finds a peer, and the families that it is asked about."""

    module: str
    families: tuple[str, ...]
    default: bool = True


KNOWN: Mapping[str, Known] = {
    "cudnn": Known("sdpa", _PREFILL),
    "fa2": Known("sdpa", _PREFILL),
    "fa3": Known("flash_attention_3", _BOTH),
    "fa4": Known("flash_attention_4", _PREFILL),
    "flashinfer": Known("flash_infer", _BOTH),
    "vllm": Known("vllm_triton", _DECODE),
    "flex": Known("flex", _PREFILL, default=False),
}
"""All peers, in the order in which they are shown. FlexAttention compiles for a minute, so it has to be asked for."""

DEFAULT = tuple(name for name, known in KNOWN.items() if known.default)


class PeerError(Exception):
    """A peer that was asked for by name cannot be had."""


@dataclass(frozen=True)
class Peers:
    """The peers that were found by name, and why others were not."""

    found: Mapping[str, Peer] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def of(self, family: str) -> dict[str, Peer]:
        """Those that are asked about a family; a peer that is not in the table of known ones is always asked."""
        return {name: peer for name, peer in self.found.items() if name not in KNOWN or family in KNOWN[name].families}


def find(
    names: Sequence[str] = DEFAULT,
    families: Collection[str] = _BOTH,
    *,
    fa3: str | Path | None = None,
    required: Collection[str] = (),
) -> Peers:
    """Import the peers of these names that serve one of the families.

    `fa3` is the shared object `_vllm_fa3_C.abi3.so` to take FlashAttention-3 from. Raises PeerError where a `required`
    peer is absent, or `fa3` cannot be loaded, and KeyError for a name that is not known.
    """
    from dsl.bench.peers.work import Absent

    found: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    for name in names:
        known = KNOWN[name]
        if not set(families) & set(known.families):
            if name in required:
                absent[name] = f"it is asked about {' and '.join(known.families)}, which no block is"
            continue
        module = importlib.import_module(f"{__name__}.{known.module}")
        try:
            found[name] = module.find(name, fa3=fa3)
        except Absent as reason:
            if name in required or (name == "fa3" and fa3 is not None):
                raise PeerError(f"{name}: {reason}") from reason
            absent[name] = str(reason)
    return Peers(found, absent)
