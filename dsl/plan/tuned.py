"""Tile sizes that were measured, as data: one JSON file a GPU architecture in `dsl/tuning/`, written by `tune`.

An entry serves the blocks of its family whose dtype has `itemsize` bytes, whose larger head dimension is at most
`head_dim`, and whose query heads per KV head are at most `group`; the first that serves a block is its first candidate.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsl.resources import tuning_folder
from dsl.spec import ITEMSIZE, Spec


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """What a persistent kernel shares out its work by, in units of a turn of all its warpgroups.

    `turn` and `item` have a number for each count of warpgroups that have rows: a turn of theirs, and what a tile of
    queries takes beside its turns. `merge` is what merging splits takes.
    """

    turn: tuple[float, ...]
    item: tuple[float, ...]
    merge: float


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """By what the Hopper kernels for `single x paged` share out keys.

    `programs` on a processor, at most `splits` of a sequence, of at least `split_keys` each; whole sequences where
    there are more of them and a table has room for `whole_keys` at most; a ring that has `bytes_in_flight` on a
    processor. The kernel for short contexts takes up to `registers_bytes` of keys and values that make up
    `registers_programs` parts on a processor, and cuts them into small parts where that makes no more than
    `few_programs` programs, or twice as many where there would be parts anyway.
    """

    programs: int
    splits: int
    split_keys: int
    whole_keys: int
    bytes_in_flight: int
    registers_bytes: int
    registers_programs: int
    few_programs: int


@functools.cache
def _data(architecture: str) -> Mapping[str, Any]:
    path = tuning_folder() / f"{architecture}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"entries": []}


def work_times(architecture: str) -> WorkTimes:
    """The measured times of an architecture. Raises KeyError where none were measured."""
    times = _data(architecture)["work_times"]
    return WorkTimes(tuple(times["turn"]), tuple(times["item"]), times["merge"])


def decode_work(architecture: str) -> DecodeWork:
    """The measured rules of an architecture. Raises KeyError where none were measured."""
    return DecodeWork(**_data(architecture)["decode_work"])


def tuned(spec: Spec, architecture: str) -> Mapping[str, int] | None:
    """The measured tiles and launch options for a block: its constants, `num_warps` and `num_stages`; None if none."""
    for entry in _data(architecture)["entries"]:
        if (
            entry["family"] == spec.family
            and entry["itemsize"] == ITEMSIZE[spec.dtype]
            and max(spec.head_dim_qk, spec.head_dim_v) <= entry["head_dim"]
            and spec.group <= entry["group"]
        ):
            return entry["config"]
    return None
