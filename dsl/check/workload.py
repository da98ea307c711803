"""Workloads: lists of cases, each the lengths of its sequences."""

from __future__ import annotations

from dsl import nodes
from dsl.check.draft import Draft
from dsl.check.resolve import Drafts
from dsl.diagnostics import near, quote
from dsl.spec import Case, Workload

FIELDS = ("seqs", "q_len", "kv_len")
MOST_SEQUENCES = 1 << 20

Lengths = int | tuple[int, ...]


def workloads(drafts: Drafts) -> list[Workload]:
    """Every workload that could be read."""
    first: dict[str, nodes.Name] = {}
    found = []
    for block in drafts.file.blocks:
        if not isinstance(block, nodes.Workload):
            continue
        draft = None
        if block.name is not None:
            draft = drafts.attention(block.name, "block")
            if first.setdefault(block.name.text, block.name) is not block.name:
                related = [(first[block.name.text].span, "the first one")]
                message = f"block {quote(block.name.text)} has a second workload"
                drafts.error("ATTN206", block.name.span, message, "list the cases in one", related)
        workload = _Reader(drafts, block, draft).read()
        if workload is not None:
            found.append(workload)
    return found


class _Reader:
    """Reads one workload; `draft` is the block that it names, if that is known."""

    def __init__(self, drafts: Drafts, block: nodes.Workload, draft: Draft | None) -> None:
        self.drafts = drafts
        self.block = block
        self.query = draft.values.get("query") if draft else None
        self.fields: dict[str, nodes.Field] = {}
        self.before = len(drafts.diagnostics)

    def read(self) -> Workload | None:
        self._collect()
        columns = {name: self._column(name, field) for name, field in self.fields.items()}
        if len(self.drafts.diagnostics) == self.before:
            self._complete()
            self._same_length(columns)
        name = self.block.name
        if len(self.drafts.diagnostics) > self.before or self.query is None or self.block.broken or name is None:
            return None
        count = max(len(column) for column in columns.values())
        columns = {name: column * count if len(column) == 1 else column for name, column in columns.items()}
        cases = [self._case({name: column[i] for name, column in columns.items()}) for i in range(count)]
        if len(self.drafts.diagnostics) > self.before or self._too_many(cases):
            return None
        expanded = tuple(Case(_expand(q, seqs), _expand(kv, seqs)) for seqs, q, kv in cases)
        spans = {"name": name.span, **{name: field.value.span for name, field in self.fields.items()}}
        return Workload(name.text, expanded, spans)

    def _collect(self) -> None:
        for field in self.block.fields:
            name = field.name.text
            if name not in FIELDS:
                advice = near(name, FIELDS) or "its fields are `seqs`, `q_len` and `kv_len`"
                self._error(field.name, f"a workload has no field {quote(name)}", advice, code="ATTN203")
            elif name in self.fields:
                related = [(self.fields[name].name.span, "first set here")]
                self.drafts.error("ATTN204", field.name.span, f"field {quote(name)} is set twice", related=related)
            else:
                self.fields[name] = field

    def _column(self, name: str, field: nodes.Field) -> list[Lengths]:
        """One entry a case: a number, or a number for each sequence."""
        if not isinstance(field.value, nodes.List):
            return [self._number(name, field.value)]
        if not field.value.items:
            self._error(field.value, f"`{name}` lists no case")
        return [self._entry(name, item) for item in field.value.items]

    def _entry(self, name: str, item: nodes.Value) -> Lengths:
        if not isinstance(item, nodes.List):
            return self._number(name, item)
        if name == "seqs":
            self._error(item, "`seqs` takes one number a case")
        elif not item.items:
            self._error(item, "a case has at least one sequence")
        return tuple(self._number(name, number) for number in item.items)

    def _number(self, name: str, value: nodes.Value) -> int:
        least = 1 if name == "seqs" else 0
        if isinstance(value, nodes.Number) and isinstance(value.value, int) and value.value >= least:
            return value.value
        what = "a case's number of sequences" if name == "seqs" else "a length"
        self._error(value, f"{what} is a whole number from {least}")
        return least

    def _complete(self) -> None:
        if self.query is None or self.block.broken:
            return
        needed = "kv_len" if self.query == "single" else "q_len"
        if needed not in self.fields:
            self._error(self.block.name, f"the workload lacks the field `{needed}`", code="ATTN205")

    def _same_length(self, columns: dict[str, list]) -> None:
        lists = [(name, len(column)) for name, column in columns.items() if len(column) > 1]
        for name, length in lists[1:]:
            first, expected = lists[0]
            if length != expected:
                related = [(self.fields[first].value.span, f"{expected} cases")]
                message = f"`{name}` lists {length} cases, `{first}` {expected}"
                self._error(self.fields[name].value, message, related=related)

    def _case(self, entry: dict[str, Lengths]) -> tuple[int, Lengths, Lengths]:
        """The number of sequences, the query lengths and the KV lengths of one case."""
        q = 1 if self.query == "single" else entry["q_len"]
        kv = entry.get("kv_len", q)
        counts = {name: len(lengths) for name, lengths in entry.items() if isinstance(lengths, tuple)}
        if isinstance(seqs := entry.get("seqs"), int):
            counts["seqs"] = seqs
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{count} by `{name}`" for name, count in counts.items())
            self._error(self.fields[next(iter(counts))].value, f"a case has as many sequences as it has: {said}")
        self._query_lengths(entry.get("q_len"))
        return next(iter(counts.values()), 1), q, kv

    def _query_lengths(self, q: Lengths | None) -> None:
        if q is None:
            return
        lengths = set(q) if isinstance(q, tuple) else {q}
        if self.query == "single" and lengths != {1}:
            self._error(self.fields["q_len"].value, "a single query has `q_len` 1", "leave `q_len` out")
        elif self.query == "batched" and len(lengths) > 1:
            self._error(self.fields["q_len"].value, "a batched query has one length for all sequences of a case")

    def _too_many(self, cases: list[tuple[int, Lengths, Lengths]]) -> bool:
        total = sum(seqs for seqs, _, _ in cases)
        if total > MOST_SEQUENCES:
            place = self.fields.get("seqs") or next(iter(self.fields.values()))
            self._error(place.value, f"a workload has at most {MOST_SEQUENCES} sequences, not {total}")
        return total > MOST_SEQUENCES

    def _error(self, place, message: str, advice: str | None = None, related=(), code: str = "ATTN314") -> None:
        self.drafts.error(code, place.span, message, advice, related)


def _expand(lengths: Lengths, seqs: int) -> tuple[int, ...]:
    return lengths if isinstance(lengths, tuple) else (lengths,) * seqs
