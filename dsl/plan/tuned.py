"""Tile sizes that were measured, as data: one JSON file a GPU architecture in `dsl/tuning/`, written by `tune`.

An entry serves the blocks of its family whose dtype has `itemsize` bytes, whose larger head dimension is at most
`head_dim`, and whose query heads per KV head are at most `group`; the first that serves a block is its first candidate.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from dsl.resources import tuning_folder
from dsl.spec import ITEMSIZE, Spec


@functools.cache
def _entries(architecture: str) -> tuple[Mapping[str, Any], ...]:
    path = tuning_folder() / f"{architecture}.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))["entries"]) if path.is_file() else ()


def tuned(spec: Spec, architecture: str) -> Mapping[str, int] | None:
    """The measured tiles and launch options for a block: its constants, `num_warps` and `num_stages`; None if none."""
    for entry in _entries(architecture):
        if (
            entry["family"] == spec.family
            and entry["itemsize"] == ITEMSIZE[spec.dtype]
            and max(spec.head_dim_qk, spec.head_dim_v) <= entry["head_dim"]
            and spec.group <= entry["group"]
        ):
            return entry["config"]
    return None
