"""Who owns which row and which key: lengths as the language reads them, clamped to what the tensors can hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsl.spec import Layout, Spec


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence. Rows of the output are counted over the whole batch; `kv_start` is 0 unless keys are packed."""

    index: int
    row_start: int
    q_len: int
    kv_start: int
    kv_len: int

    @property
    def first_position(self) -> int:
        """The position of the first query: queries and keys line up at the end."""
        return self.kv_len - self.q_len


def extent(spec: Spec, arguments: Mapping[str, Any], name: str, axis: str) -> int:
    """The extent of a logical axis of one of the tensors."""
    layout: Layout = {"k": spec.k_layout, "v": spec.v_layout}.get(name[0], spec.q_layout)
    product = 1
    for part, size in zip(layout, arguments[name].shape, strict=True):
        product *= size if part.name == axis else 1
    return product


def sequences(spec: Spec, arguments: Mapping[str, Any]) -> tuple[Sequence, ...]:
    """Every sequence of a batch, in order."""
    if spec.family == "dense":
        return _dense(spec, arguments)
    if spec.family == "prefill":
        keys = _spans(arguments["cu_seqlens_k"].tolist(), extent(spec, arguments, "k", "kv_token"))
    else:
        capacity = arguments["block_tables"].shape[1] * spec.block  # type: ignore[operator]
        keys = [(0, _clamp(length, capacity)) for length in arguments["seq_lens"].tolist()]
    if spec.family == "decode":
        queries = [(row, 1) for row in range(extent(spec, arguments, "query", "seq"))]
    else:
        queries = _spans(arguments["cu_seqlens_q"].tolist(), extent(spec, arguments, "q", "q_token"))
    return tuple(Sequence(index, *query, *key) for index, (query, key) in enumerate(zip(queries, keys, strict=True)))


def rows(spec: Spec, arguments: Mapping[str, Any]) -> int:
    """How many query rows the batch has, rows of no sequence included."""
    if spec.family == "decode":
        return extent(spec, arguments, "query", "seq")
    if spec.family == "dense":
        return extent(spec, arguments, "q", "seq") * extent(spec, arguments, "q", "q_token")
    return extent(spec, arguments, "q", "q_token")


def _dense(spec: Spec, arguments: Mapping[str, Any]) -> tuple[Sequence, ...]:
    count, q_len = extent(spec, arguments, "q", "seq"), extent(spec, arguments, "q", "q_token")
    capacity = extent(spec, arguments, "k", "kv_token")
    given = arguments.get("kv_lens")
    lengths = [capacity] * count if given is None else [_clamp(length, capacity) for length in given.tolist()]
    return tuple(Sequence(index, index * q_len, q_len, 0, length) for index, length in enumerate(lengths))


def _spans(bounds: list[int], total: int) -> list[tuple[int, int]]:
    """(start, length) of each pair of neighbouring bounds."""
    clamped = [_clamp(bound, total) for bound in bounds]
    return [(start, max(0, end - start)) for start, end in itertools.pairwise(clamped)]


def _clamp(length: int, capacity: int) -> int:
    return min(max(length, 0), capacity)
