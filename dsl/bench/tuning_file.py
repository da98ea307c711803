"""The file that keeps measured tiles, as `dsl.plan.tuned` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dsl.bench.measure import Machine
from dsl.spec import ITEMSIZE, Spec

RULES = ("work_times", "decode_work")
SCHEMA = "attnspec.tuning/1"


class Key(NamedTuple):
    """Which blocks an entry serves: those of its family and itemsize, up to its head dimension and group.

    The first entry that serves a block counts, so entries stand in this order: the closest fit comes first.
    """

    family: str
    itemsize: int
    head_dim: int
    group: int


class TuningFileError(Exception):
    """The file exists and is no file of measured tiles, or holds what would be lost if it were written anew."""


def key_of(spec: Spec) -> Key:
    return Key(spec.family, ITEMSIZE[spec.dtype], max(spec.head_dim_qk, spec.head_dim_v), spec.group)


def read_entries(path: Path) -> dict[Key, dict[str, int]]:
    """The entries of a file, none where it does not exist yet. Raises OSError or TuningFileError."""
    if not path.exists():
        if not path.parent.is_dir():
            raise TuningFileError(f"{path}: there is no such folder")
        return {}
    entries: dict[Key, dict[str, int]] = {}
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise KeyError("schema")
        for entry in data["entries"]:
            key = Key(*(entry[name] for name in Key._fields))
            _refuse_what_would_be_lost(path, key, entry, key in entries)
            entries[key] = dict(entry["config"])
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise TuningFileError(f"{path}: is no file of measured tiles") from error
    return entries


def read_rules(path: Path) -> dict[str, Any]:
    """What `dsl.plan.tuned` reads of the file beside its entries, as it stands there: rules of sharing out work."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: data[name] for name in RULES if name in data}


def _refuse_what_would_be_lost(path: Path, key: Key, entry: Mapping[str, Any], is_repeated: bool) -> None:
    shown = ", ".join(f"{name} {value}" for name, value in key._asdict().items())
    if is_repeated:
        raise TuningFileError(f"{path}: has two entries for {shown}, of which the plan reads the first; remove one")
    if unknown := sorted(entry.keys() - {*Key._fields, "config"}):
        raise TuningFileError(f"{path}: the entry for {shown} has what tune does not know: {', '.join(unknown)}")


def text_of(
    machine: Machine, entries: Mapping[Key, Mapping[str, int]], rules: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """The text of a file with these entries, and rules from `read_rules`."""
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "gpu": machine.gpu,
                "triton": machine.triton,
                **rules,
                "entries": [{**key._asdict(), "config": dict(entries[key])} for key in sorted(entries)],
            },
            indent=2,
        )
        + "\n"
    )
