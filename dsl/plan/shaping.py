"""What `mask`, `score`, `sink`, a scale that is a param, and params add to the text of a kernel.

A family says what the names of expressions stand for in its kernel (`Surroundings`); out come lines, ready to print:
those ahead of the loops over keys, and those of a step, with and without the mask. Nothing here knows a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from dsl.expr.intervals import Ranges
from dsl.expr.statements import KEYS, ROWS, SCALAR, Axes, Computed, Scope, Value
from dsl.expr.to_triton import BOTH, TensorParam, Triton, placed
from dsl.expr.tree import Constant, Expression, Index, Name
from dsl.expr.types import param_type
from dsl.expr.visible import (
    EVERY_KEY,
    Alternatives,
    ElementTest,
    KeyRange,
    combined,
    hull,
    leaves_no_hole,
    parts_of,
    reaches_row,
    visible_ranges,
)
from dsl.plan.module import Argument
from dsl.plan.params import tensor_param
from dsl.plan.tiles import LOG2_E
from dsl.source import Source
from dsl.spec import Param, Spec


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a kernel has in scope where expressions stand.

    `names` maps the built-ins, `kv_start` and `score` to values. Rows past a tile's last stand where that one stands:
    they see and read the same. `rows` and `keys` are the printed extents of a tile. `live_keys` names
    the test of the keys that lie inside the sequence, `seen` that of the keys that some row sees.
    """

    names: Mapping[str, Value | Computed]
    ranges: Ranges
    rows: str
    keys: str
    live_keys: str
    seen: str
    kv_len: str
    carries_sink: str | None

    @property
    def shapes(self) -> Mapping[Axes, str]:
        return {
            frozenset((ROWS,)): f"[{self.rows}]",
            frozenset((KEYS,)): f"[{self.keys}]",
            BOTH: f"[{self.rows}, {self.keys}]",
        }


@dataclass(frozen=True, slots=True)
class StepLines:
    """The lines of one step: tests ahead of the loads, the score behind the dots, and the printed visibility."""

    tests: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True, slots=True)
class ScannedTest:
    """A test of tiles by the least and the greatest element of a param in each.

    `may` and `must` are printed over vectors of tiles: `least_<number>` and `most_<number>` bound a tile's elements,
    `low_<number>` and `high_<number>` what the rows, of whom `row_value` is printed, compare them with.
    """

    number: int
    param: str
    tensor: TensorParam
    row_value: str
    may: str
    must: str

    @property
    def bounds(self) -> str:
        """The kernel's argument for the bounds of all tiles."""
        return f"bounds_param_{self.param}"


@dataclass(frozen=True, slots=True)
class Shaping:
    """The lines of a block's expressions, and what else the kernel's text depends on.

    `ahead` stand ahead of the loops; `full` and `partial` are the steps over tiles that all rows see whole and over
    others. `ranges` are the arguments of `_tile_ranges`, one for each range of keys that a tile of rows visits.
    """

    params: tuple[Param, ...] = ()
    tensors: tuple[TensorParam, ...] = field(default=(), compare=False)
    large: frozenset[tuple[str, int]] = frozenset()
    masked: bool = False
    scored: bool = False
    sunk: bool = False
    ahead: tuple[str, ...] = ()
    sink: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    exact: tuple[bool, ...] = (True,)
    scan: tuple[ScannedTest, ...] = ()
    bounds_tell: bool = False
    full: StepLines = StepLines()
    partial: StepLines = StepLines()
    functions: frozenset[str] = frozenset()
    alternatives: Alternatives = field(default=EVERY_KEY, compare=False)

    @property
    def shaped(self) -> bool:
        """Whether scores are touched between the dots and the softmax."""
        return self.masked or self.scored

    @property
    def has_full(self) -> bool:
        """Whether some tiles are known to be seen whole."""
        return any(self.exact)

    @property
    def first_exact(self) -> bool:
        return self.exact[0]

    @property
    def last_exact(self) -> bool:
        return self.exact[-1]

    @property
    def both_exact(self) -> bool:
        return all(self.exact)

    @property
    def reduces(self) -> bool:
        """Whether it takes a reduction over all rows to tell which keys some row sees."""
        return self.masked and not self.bounds_tell

    @property
    def key_ranges(self) -> tuple[str, ...]:
        """The arguments of `_seen_keys`: those of `_tile_ranges` without the tile."""
        return tuple(text.rpartition(", ")[0] for text in self.ranges)

    @property
    def two_ranges(self) -> bool:
        return len(self.ranges) > 1

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments for params: pointers first, then their strides and extents, then numbers."""
        numbers = {"int32": "int32", "int64": "int64", "bool": "int32", "bf16": "fp32", "fp16": "fp32", "fp32": "fp32"}
        return (
            *(Argument(f"param_{tensor.name}", "pointer", tensor.dtype) for tensor in self.tensors),
            *dict.fromkeys(Argument(test.bounds, "pointer", test.tensor.dtype, varies=False) for test in self.scan),
            *(Argument(name, "integer", "int32") for tensor in self.tensors for name in self.integers_of(tensor)),
            *((Argument("bounds_blocks", "integer", "int32"),) if self.scan else ()),
            *(
                Argument(f"param_{param.name}", "integer", numbers[param.dtype])
                for param in self.params
                if param.axes is None
            ),
        )

    @staticmethod
    def integers_of(tensor: TensorParam) -> tuple[str, ...]:
        return (*tensor.strides, *(extent for extent in tensor.extents if isinstance(extent, str)))

    @property
    def pointers(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if argument.kind == "pointer")

    @property
    def integers(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if argument.kind == "integer")


PLAIN = Shaping()


def place_of(spec: Spec, source: Source, field: str) -> str:
    """Where a field was written, as `layer.attn:9 mask`: the base's place for one that is inherited."""
    span = spec.inherited.get(field, spec.spans[field])
    return f"{PurePath(source.name).name}:{source.position(span.start)[0]} {field}"


def shape(spec: Spec, source: Source, around: Surroundings) -> Shaping:
    """Print a block's expressions for one kernel."""
    return _Shaper(spec, source, around).shape() if has_expressions(spec) else PLAIN


def alternatives(spec: Spec, around: Surroundings) -> Alternatives:
    """The ranges of keys that a tile of rows visits. Fixed splits begin at fixed keys, so they have one range."""
    found = visible_ranges(spec.mask, around.ranges, element_tests=spec.family == "prefill")
    return (hull(found),) if spec.split.kind == "fixed" and len(found) > 1 else found


def bounds_tell(spec: Spec, around: Surroundings) -> bool:
    """Whether the bounds of rows alone tell which keys some row of a tile sees."""
    found = alternatives(spec, around)
    return spec.query == "packed" and bool(found) and all(leaves_no_hole(each, around.ranges) for each in found)


def without_idle_mask(spec: Spec, around: Surroundings) -> Spec:
    """The block as it is computed: a decode's one query is the last token, and a causal mask hides no key from it."""
    if spec.query == "single" and spec.has_mask and reaches_row(alternatives(spec, around), around.ranges):
        return replace(spec, mask=Constant(True, "bool"))
    return spec


def pair_bytes(spec: Spec, around: Surroundings) -> int:
    """The bytes that mask and score read from params for each pair of a row and a key."""
    dtypes = {param.name: param.dtype for param in spec.params}
    read = {index for part in (spec.mask, spec.score) for index in _indices(part)}
    return sum(_BYTES[dtypes[index.param]] for index in read if _axes(index, around.names) == BOTH)


def scales(spec: Spec, shaping: Shaping) -> dict[str, float]:
    """The constants that take products to base 2: at once, or on either side of the score."""
    if not shaping.scored:
        assert isinstance(spec.scale, float)
        return {"SCALE_LOG2": spec.scale * LOG2_E}
    return {**({"SCALE": spec.scale} if isinstance(spec.scale, float) else {}), "SCALE_LOG2": LOG2_E}


def has_expressions(spec: Spec) -> bool:
    """Whether a block says more than how queries meet all keys."""
    return bool(fields_of_expressions(spec))


def fields_of_expressions(spec: Spec) -> tuple[str, ...]:
    """The fields by which a block says more than how queries meet all keys."""
    written = {
        "mask": spec.has_mask,
        "score": spec.has_score,
        "sink": spec.sink is not None,
        "param": bool(spec.params),
    }
    return tuple(name for name, holds in written.items() if holds)


@dataclass
class _Shaper:
    spec: Spec
    source: Source
    around: Surroundings

    def shape(self) -> Shaping:
        spec, around = self.spec, self.around
        tensors = {param.name: tensor_param(param, spec) for param in spec.params if param.axes is not None}
        numbers = {param.name: _number(param) for param in spec.params if param.axes is None}
        names = {**around.names, **numbers}
        outer = Scope(Triton(tensors, around.ranges, spec.heads), names, around.shapes)
        if spec.has_score:
            names["score"] = Computed("score", f"scores * {self._scale(outer)}", "float", BOTH)
        # What is hoisted out of the loops is printed first: then it is known which names are taken.
        self._hoist(outer)
        hoisted, outer.statements = tuple(outer.statements), []
        found = self._alternatives()
        ranges = tuple(self._range(outer, each) for each in found) or (f"0, -1, {self._tile}",)
        element_tests = [test for each in found for test in each.tests]
        tests = tuple(self._scanned(outer, number, test) for number, test in enumerate(element_tests, 1))
        sink = self._sink(outer)
        full, partial = self._step(outer, masked=False), self._step(outer, masked=True)
        assert not outer.statements, "everything that does not change in the loops has been hoisted"
        return Shaping(
            params=spec.params,
            tensors=tuple(tensors.values()),
            large=frozenset(self._large()),
            masked=spec.has_mask,
            scored=spec.has_score or isinstance(spec.scale, str),
            sunk=spec.sink is not None,
            ahead=hoisted,
            sink=sink,
            ranges=ranges,
            exact=tuple(each.exact for each in found),
            scan=tests,
            full=full,
            partial=partial,
            bounds_tell=spec.has_mask and bounds_tell(spec, around),
            functions=_functions((*hoisted, *full.score, *partial.score, *partial.tests)),
            alternatives=found,
        )

    def _hoist(self, outer: Scope) -> None:
        """Print everything once, for what stands ahead of the loops, each field under its place."""
        spec = self.spec

        def mask() -> None:
            for each in self._alternatives():
                self._range(outer, each)
                for test in each.tests:
                    outer.print(test.value)
            outer.inner("inner_").print(spec.mask)

        def score() -> None:
            outer.inner("inner_").print(spec.score)

        def scale() -> None:
            self._scale(outer)

        def sink() -> None:
            if spec.sink is not None:
                outer.print(spec.sink)

        fields = {"mask": mask, "scale": scale, "score": score, "sink": sink}
        for name, print_field in fields.items():
            before = len(outer.statements)
            print_field()
            if len(outer.statements) > before:
                outer.statements.insert(before, self._place(name))

    def _place(self, name: str) -> str:
        return f"# {place_of(self.spec, self.source, name)}"

    def _alternatives(self) -> Alternatives:
        return alternatives(self.spec, self.around)

    @property
    def _tile(self) -> str:
        """The arguments of `_tile_ranges` behind the bounds."""
        around = self.around
        return f"{around.kv_len}, {around.keys}"

    def _range(self, outer: Scope, found: KeyRange) -> str:
        """The arguments of `_tile_ranges` for one range of keys."""
        lower = outer.print(combined("max", found.lowers)).text if found.lowers else "0"
        upper = outer.print(combined("min", found.uppers)).text if found.uppers else f"{self.around.kv_len} - 1"
        return f"{lower}, {upper}, {self._tile}"

    def _scanned(self, outer: Scope, number: int, test: ElementTest) -> ScannedTest:
        name = test.element.param
        tensor = tensor_param(self._param(name), self.spec)
        may, must = _TILE_TESTS[test.operator]
        words = {word: f"{word}_{number}" for word in ("least", "most", "low", "high")}
        value = outer.print(test.value)
        text = value.text if ROWS in value.axes else f"{value.text} + tl.zeros([1], tl.int32)"
        return ScannedTest(number, name, tensor, text, may.format(**words), must.format(**words))

    def _param(self, name: str) -> Param:
        return next(param for param in self.spec.params if param.name == name)

    def _scale(self, scope: Scope) -> str:
        """What products are multiplied by ahead of the score."""
        if not isinstance(self.spec.scale, str):
            return "SCALE"
        value = scope.name(self.spec.scale)
        return scope.dialect.as_type(value, "float").text

    def _sink(self, outer: Scope) -> tuple[str, ...]:
        if self.spec.sink is None:
            return ()
        value = outer.dialect.as_type(outer.print(self.spec.sink), "float")
        line = f"{value.text} * _LOG2_E"
        if self.around.carries_sink:
            line = f'tl.where({self.around.carries_sink}, {line}, float("-inf"))'
        shape = self.around.shapes.get(value.axes)
        return f"{self._place('sink')}: one more logit of each row", f"sink = {line}{f'  # {shape}' if shape else ''}"

    def _step(self, outer: Scope, masked: bool) -> StepLines:
        inner = outer.inner()
        visible = self._test(inner) if masked else ""
        tests, inner.statements = tuple(inner.statements), []
        self._score(inner)
        return StepLines(tests, tuple(inner.statements), visible)

    def _test(self, inner: Scope) -> str:
        """Print which keys of a tile the rows see, and which of them any row sees; return the former."""
        around = self.around
        if not self.spec.has_mask:
            return f"{around.live_keys}[None, :]"
        inner.statements.append(self._place("mask"))
        value = inner.print(self.spec.mask)
        if ROWS not in value.axes:
            inner.statements.append(f"{around.seen} = {around.live_keys} & {value.text}  # [{around.keys}]")
            return f"{around.seen}[None, :]"
        inner.statements.append(
            f"visible = {around.live_keys}[None, :] & {placed(value, BOTH)}  # {around.shapes[BOTH]}"
        )
        inner.statements += self._seen(inner)
        return "visible"

    def _seen(self, inner: Scope) -> list[str]:
        """Which keys some row of the tile sees: what none sees may hold anything, NaN too."""
        around = self.around
        if not bounds_tell(self.spec, around):
            return [f"{around.seen} = tl.max(visible.to(tl.int32), 0) > 0  # what no row sees may hold anything"]
        position = inner.name("kv").text
        found = self._alternatives()
        if len(found) == 1:
            test = f"({position} >= first_key) & ({position} <= last_key)"
            return [f"{around.seen} = {around.live_keys} & {test}  # [{around.keys}]"]
        tests = {side: f"({position} >= first_key_{side}) & ({position} <= last_key_{side})" for side in "ab"}
        lines = [f"seen_{side} = {test}  # [{around.keys}]" for side, test in tests.items()]
        return [*lines, f"{around.seen} = {around.live_keys} & (seen_a | seen_b)  # [{around.keys}]"]

    def _score(self, inner: Scope) -> None:
        around, spec = self.around, self.spec
        if not spec.has_score:
            if isinstance(spec.scale, str):
                inner.statements += [self._place("scale"), f"scores = scores * {self._scale(inner)}"]
            return
        inner.statements.append(self._place("score"))
        value = inner.dialect.as_type(inner.print(spec.score), "float")
        same = placed(value, BOTH)
        whole = same if value.axes == BOTH else f"tl.zeros([{around.rows}, {around.keys}], tl.float32) + {same}"
        inner.statements.append(f"scores = {whole}")

    def _large(self) -> set[tuple[str, int]]:
        """Axes of params that are indexed by row and key at once: their offsets are 32 bits wide."""
        found = set()
        for expression in (self.spec.mask, self.spec.score):
            for index in _indices(expression):
                for place, part in enumerate(index.indices):
                    if _axes(part, self.around.names) == BOTH:
                        found.add((index.param, place))
        return found


_BYTES = {"bool": 1, "bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "int64": 8}
_TILE_TESTS: Mapping[str, tuple[str, str]] = {
    "==": (
        "({least} <= {high}) & ({most} >= {low})",
        "({least} == {high}) & ({most} == {low})",
    ),
    "!=": (
        "({least} != {high}) | ({most} != {low})",
        "({least} > {high}) | ({most} < {low})",
    ),
    "<": ("{least} < {high}", "{most} < {low}"),
    "<=": ("{least} <= {high}", "{most} <= {low}"),
    ">": ("{most} > {low}", "{least} > {high}"),
    ">=": ("{most} >= {low}", "{least} >= {high}"),
}
"""When a tile of keys may, and must, hold elements like that: `least` and `most` bound the tile's elements, `low` and
`high` what the rows compare them with."""


def _number(param: Param) -> Value | Computed:
    """A number that the caller passes, in the type that expressions have."""
    kind = param_type(param)
    if kind == "int32":
        return Value(f"param_{param.name}", "int32")
    expression = {
        "int64": f"param_{param.name}.to(tl.int64)",
        "bool": f"param_{param.name} != 0",
        "float": f"tl.full([], param_{param.name}, tl.float32)",
    }[kind]
    return Computed(f"{param.name}_number", expression, kind)


def _indices(expression: Expression) -> list[Index]:
    found = [expression] if isinstance(expression, Index) else []
    return found + [index for part in parts_of(expression) for index in _indices(part)]


def _axes(expression: Expression, names: Mapping[str, Value | Computed]) -> Axes:
    if isinstance(expression, Name):
        found = names.get(expression.name)
        return SCALAR if found is None else found.axes
    return frozenset().union(*(_axes(part, names) for part in parts_of(expression)))


def _functions(lines: tuple[str, ...]) -> frozenset[str]:
    known = ("_tanh", "_floor_quotient", "_floor_remainder")
    return frozenset(name for name in known if any(f"{name}(" in line for line in lines))
