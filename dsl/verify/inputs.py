"""Inputs in a spec's own layouts, made from logical tensors; with an adversity, full of traps that must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsl.spec import Case, Layout, Param, Spec
from dsl.verify.cases import PLAIN, Adversity
from dsl.verify.layouts import to_physical
from dsl.verify.oracle import QUERY_AXES, score_scale, visible_keys
from dsl.verify.placement import DTYPES, INT8_STEPS, SENTINEL, interleaved, output, placed
from dsl.verify.sequences import Sequence, sequences
from dsl.verify.trends import direction, follow

_PARAM_DTYPES = {**DTYPES, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
_KEY_AXES = {
    "paged": ("block", "slot", "kv_head", "dim"),
    "packed": ("kv_token", "kv_head", "dim"),
    "batched": ("seq", "kv_token", "kv_head", "dim"),
}
_MOST_LOGITS = 1e3
"""What a query is multiplied by at most: with a tiny scale, large scores would need numbers beyond the dtype."""
_SPARE_ROWS = (3, 2)
"""Rows before the first and after the last packed sequence that no sequence owns."""


@dataclass(frozen=True)
class Inputs(Mapping[str, Any]):
    """Arguments by name, and the caller's output buffers where the adversity wants them."""

    spec: Spec
    arguments: Mapping[str, Any]
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    guards: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    @property
    def positional(self) -> tuple[Any, ...]:
        return tuple(self.arguments[name] for name in self.spec.arguments)

    @property
    def keywords(self) -> dict[str, Any]:
        """Params and the like; the output buffers are `outputs`."""
        return {name: value for name, value in self.arguments.items() if name not in self.spec.arguments}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        given = {"out": self.out, "out_lse": self.lse}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written beside the output buffers."""
        return all(bool((guard == SENTINEL).all()) for guard in self.guards)


def make_inputs(
    spec: Spec,
    case: Case,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
    adversity: Adversity = PLAIN,
) -> Inputs:
    """Inputs for one batch; `case` holds one query and one KV length a sequence.

    A dense batch has one query length, its first; a decode batch ignores query lengths.
    """
    device = torch.device(device)
    if generator is None:
        generator = torch.Generator(device).manual_seed(0)
    return _Maker(spec, case, device, generator, adversity).make()


@dataclass
class _Maker:
    spec: Spec
    case: Case
    device: torch.device
    generator: torch.Generator
    adversity: Adversity

    def make(self) -> Inputs:
        spec = self.spec
        lengths = self._lengths()
        names = ("k_cache", "v_cache") if spec.kv == "paged" else ("k", "v")
        logical = {name: self._keys(name) for name in names if name in spec.arguments}
        query = self._query()
        given = self._placed(query, logical) | lengths
        arguments = {name: given[name] for name in spec.arguments}
        arguments |= {name: value for name, value in lengths.items() if name not in arguments}
        arguments |= self._scales(len(self.case.kv_lens)) | {
            param.name: self._param(param, query) for param in spec.params
        }
        if self.adversity.trends:
            self._follow_trends(arguments, query, logical[names[0]])
        if self.adversity.poison:
            seen = self._seen(arguments, logical[names[0]])
            for value in logical.values():
                value[~seen] = float("nan")
        if self.adversity.trends or self.adversity.poison:
            arguments |= self._placed(query, logical)
        return self._with_outputs(arguments, query)

    # Lengths and tables.

    @property
    def _spare(self) -> tuple[int, int]:
        return _SPARE_ROWS if self.adversity.poison else (0, 0)

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.int64 if self.adversity.views == "aligned" else torch.int32

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=self._index_dtype, device=self.device)

    def _lengths(self) -> dict[str, torch.Tensor]:
        family, case = self.spec.family, self.case
        if family == "dense":
            is_full = len(set(case.kv_lens)) <= 1 and not self.adversity.room
            return {} if is_full else {"kv_lens": self._index(self._raw_lengths())}
        result = {}
        if family != "decode":
            result["cu_seqlens_q"] = self._bounds(case.q_lens)
        if family == "prefill":
            result["cu_seqlens_k"] = self._bounds(case.kv_lens)
        else:
            result |= {"block_tables": self._tables(), "seq_lens": self._index(self._raw_lengths())}
        return result

    def _bounds(self, lengths: tuple[int, ...]) -> torch.Tensor:
        bounds = [self._spare[0]]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return self._index(bounds)

    @property
    def _capacity(self) -> int:
        """Keys that a table's row, or a dense tensor, can hold."""
        longest = max((*self.case.kv_lens, self.adversity.room, 0))
        block = self.spec.block or 1
        return -(-longest // block) * block

    def _raw_lengths(self) -> list[int]:
        """Lengths as passed: under poison some are below 0 or past the capacity, and clamping makes them right."""
        if not self.adversity.poison:
            return list(self.case.kv_lens)
        raw = [-1 - place if length == 0 else length for place, length in enumerate(self.case.kv_lens)]
        return [length + 5 if length == self._capacity > 0 else length for length in raw]

    def _page_counts(self) -> list[int]:
        block = self.spec.block
        assert block is not None
        return [-(-length // block) for length in self.case.kv_lens]

    @property
    def _pages(self) -> int:
        return sum(self._page_counts()) + 3

    def _tables(self) -> torch.Tensor:
        counts, block = self._page_counts(), self.spec.block
        assert block is not None
        width = self._capacity // block
        spare = 2 if self.adversity.views != "none" else 0
        table = torch.zeros(len(counts), width + spare, dtype=self._index_dtype)
        order = torch.arange(self._pages)
        if self.adversity.poison:
            table[:, 0::2], table[:, 1::2] = 2**30, -1
            order = torch.randperm(self._pages, generator=torch.Generator().manual_seed(len(counts)))
        start = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[start : start + count]
            start += count
        whole = [row for row, length in enumerate(self.case.kv_lens) if length >= block]
        if self.adversity.poison and len(whole) > 1:
            table[whole[-1], 0] = table[whole[0], 0]
        return table.to(self.device)[:, :width]

    # Tensors.

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _query(self) -> torch.Tensor:
        """`[seq, head, dim]`, `[q_token, head, dim]` or `[seq, q_token, head, dim]`."""
        spec, case = self.spec, self.case
        tail = (spec.heads, spec.head_dim_qk)
        if spec.family == "decode":
            query = self._random(len(case.kv_lens), *tail)
        elif spec.family == "dense":
            query = self._random(len(case.kv_lens), case.q_lens[0] if case.q_lens else 0, *tail)
        else:
            before, after = self._spare
            owned = sum(case.q_lens)
            query = self._random(before + owned + after, *tail)
            query[:before] = query[before + owned :] = float("nan")
        if self.adversity.logits is not None:
            usual = spec.head_dim_qk**-0.5
            scale = spec.scale if isinstance(spec.scale, float) and spec.scale else usual
            query *= max(-_MOST_LOGITS, min(self.adversity.logits * usual / scale, _MOST_LOGITS))
        return query

    def _keys(self, name: str) -> torch.Tensor:
        """`[block, slot, kv_head, dim]`, `[kv_token, kv_head, dim]` or `[seq, kv_token, kv_head, dim]`."""
        spec = self.spec
        tail = (spec.kv_heads, spec.head_dim_qk if name[0] == "k" else spec.head_dim_v)
        if spec.kv == "paged":
            assert spec.block is not None
            return self._random(self._pages, spec.block, *tail)
        if spec.kv == "packed":
            return self._random(sum(self._spare) + sum(self.case.kv_lens), *tail)
        return self._random(len(self.case.kv_lens), self._capacity, *tail)

    def _follow_trends(self, arguments: Mapping[str, Any], query: torch.Tensor, keys: torch.Tensor) -> None:
        """Change queries and keys in place."""
        spec, adversity = self.spec, self.adversity
        rows = query.flatten(0, 1) if spec.family == "dense" else query
        scale = score_scale(spec, arguments)
        along = direction(spec.head_dim_qk, self.generator, self.device)
        for sequence in sequences(spec, arguments):
            if not (sequence.q_len and sequence.kv_len and scale):
                continue
            owned = slice(sequence.row_start, sequence.row_start + sequence.q_len)
            for kv_head in range(spec.kv_heads):
                heads = slice(kv_head * spec.group, (kv_head + 1) * spec.group)
                places = (*self._places(arguments, sequence), kv_head)
                trend = adversity.trend(sequence.index, kv_head)
                rows[owned, heads], keys[places] = follow(trend, rows[owned, heads], keys[places], scale, along)

    def _seen(self, arguments: Mapping[str, Any], keys: torch.Tensor) -> torch.Tensor:
        """Which of the stored keys some query may see, by the leading axes of `_keys`."""
        seen = torch.zeros(keys.shape[:-2], dtype=torch.bool, device=self.device)
        for sequence in sequences(self.spec, arguments):
            seen[self._places(arguments, sequence)] |= visible_keys(self.spec, arguments, sequence)
        return seen

    def _places(self, arguments: Mapping[str, Any], sequence: Sequence) -> tuple[torch.Tensor, ...]:
        """Where a sequence's keys are stored, by the leading axes of `_keys`."""
        position = torch.arange(sequence.kv_len, device=self.device)
        if self.spec.kv == "packed":
            return (sequence.kv_start + position,)
        if self.spec.kv == "batched":
            return torch.full_like(position, sequence.index), position
        assert self.spec.block is not None
        pages = arguments["block_tables"][sequence.index].long()[position // self.spec.block]
        return pages, position % self.spec.block

    def _scales(self, seqs: int) -> dict[str, torch.Tensor]:
        axes = self.spec.kv_scale_axes
        if axes is None:
            return {}
        extents = {"seq": seqs, "kv_head": self.spec.kv_heads, "slot": self.spec.block}
        if "block" in axes:
            extents["block"] = self._pages
        shape = [extents[axis] for axis in axes]
        unit = 1 / INT8_STEPS if self.spec.kv_dtype == "int8" else 1.0
        names = [f"{name[0]}_scale" for name in self.spec.arguments if name[0] in "kv"]
        return {name: unit * (0.5 + torch.rand(shape, generator=self.generator, device=self.device)) for name in names}

    def _param(self, param: Param, query: torch.Tensor) -> Any:
        dtype = _PARAM_DTYPES[param.dtype]
        if param.axes is None:
            return self._number(param, dtype)
        rows = query.shape[1] if self.spec.family == "dense" else query.shape[0]
        keys = sum(self._spare) + sum(self.case.kv_lens) if self.spec.kv == "packed" else self._capacity
        extents = {
            "head": self.spec.heads,
            "kv_head": self.spec.kv_heads,
            "seq": len(self.case.kv_lens),
            "q_token": rows,
            "kv_token": keys,
        }
        shape = [extents[axis] if isinstance(axis, str) else axis for axis in param.axes]
        if dtype.is_floating_point:
            return (4 * torch.rand(shape, generator=self.generator, device=self.device) - 2).to(dtype)
        bounds = (0, 2) if dtype == torch.bool else (-1, 5)
        values = torch.randint(*bounds, shape, generator=self.generator, device=self.device)
        # Ids by token come in runs, as those of documents do.
        return (values.sort(dim=-1).values if "token" in str(param.axes[-1]) else values).to(dtype)

    def _number(self, param: Param, dtype: torch.dtype) -> int | float | bool:
        """A positive number, so that it may be a scale, a divisor, a cap or the width of a window."""
        if param.name == self.spec.scale:
            return torch.tensor(0.75 * self.spec.head_dim_qk**-0.5).to(dtype).item()
        if dtype == torch.bool:
            return True
        return 1.25 if dtype.is_floating_point else 9

    # Placement in memory.

    def _placed(self, query: torch.Tensor, logical: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The query and the keys and values as the spec lays them out, by argument."""
        layouts = {"k": self.spec.k_layout, "v": self.spec.v_layout}
        tensors = {name: self._place_keys(value, layouts[name[0]]) for name, value in logical.items()}
        return {self.spec.arguments[0]: self._place(query, self.spec.q_layout)} | tensors

    def _place(self, logical: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A query in its layout."""
        physical = to_physical(logical, layout, QUERY_AXES[self.spec.family])
        return placed(physical, self.spec.dtype, self.adversity.views)

    def _place_keys(self, logical: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Keys or values in their layout."""
        physical = to_physical(logical, layout, _KEY_AXES[self.spec.kv])
        if self.spec.kv == "paged" and self.adversity.views == "aligned":
            return interleaved(physical, self.spec.kv_dtype)
        return placed(physical, self.spec.kv_dtype, self.adversity.views)

    def _with_outputs(self, arguments: dict[str, Any], query: torch.Tensor) -> Inputs:
        spec, views = self.spec, self.adversity.views
        if views == "none":
            return Inputs(spec, arguments)
        nothing = query.new_zeros(*query.shape[:-1], spec.head_dim_v)
        shape = to_physical(nothing, spec.out_layout, QUERY_AXES[spec.family]).shape
        out, guard = output(shape, spec.dtype, views, self.device)
        if not spec.lse:
            return Inputs(spec, arguments, out, None, (guard,))
        is_dense = spec.family == "dense"
        lse_shape = (query.shape[0], spec.heads, query.shape[1]) if is_dense else (spec.heads, query.shape[0])
        lse = torch.full(lse_shape, float("nan"), device=self.device)
        return Inputs(spec, arguments, out, lse, (guard,))
