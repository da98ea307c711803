"""Which keys a row can see, solved for the key's position: from a mask to ranges of keys.

A comparison is solved for `kv` by undoing what stands around it, operator by operator, as long as nothing wraps. What
remains is a bound that has no `kv` in it. The bounds of all rows of a tile then say which tiles of keys no row sees,
which all rows see whole, and which are in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from dsl.expr.intervals import Interval, Ranges, fits, interval, known
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary

LAST_KEY = 2**31 - 1
MOST_RANGES = 2
"""A tile of rows visits at most so many ranges of keys; more are joined."""
_MOST_ALTERNATIVES = 16
_MANY_KEYS = 2**24
_ZERO = Constant(0, "int32")
_BY_KEY = ("kv", "kv_token")
_NEGATIONS = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True, slots=True)
class ElementTest:
    """A comparison of an integer param, read at the key's token, with a value that has no key in it."""

    element: Index
    operator: str
    value: Expression


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys of a row that are at least every one of `lowers`, at most every one of `uppers`, and pass all `tests`.

    Not `exact`: some keys among them may be hidden by a part of the mask that was not solved.
    """

    lowers: tuple[Expression, ...] = ()
    uppers: tuple[Expression, ...] = ()
    tests: tuple[ElementTest, ...] = ()
    exact: bool = True


Alternatives = tuple[KeyRange, ...]
"""Ranges of which a visible key lies in one at least."""

EVERY_KEY: Alternatives = (KeyRange(),)
NO_KEY: Alternatives = ()
UNSOLVED: Alternatives = (KeyRange(exact=False),)


def visible_ranges(mask: Expression, ranges: Ranges, *, element_tests: bool = True) -> Alternatives:
    """At most two ranges, together all keys that the mask may let through; one alone may have element tests.

    `ranges` bounds the names of the mask, and `kv_start`, the packed position of a sequence's first key.
    """
    found = _Solver(ranges).solve(mask, False)
    if len(found) > 1 or not element_tests:
        found = tuple(replace(each, tests=(), exact=each.exact and not each.tests) for each in found)
    found = _merged(found)
    return found if len(found) <= MOST_RANGES else (*found[: MOST_RANGES - 1], hull(found[MOST_RANGES - 1 :]))


def names_of(expression: Expression) -> Iterator[str]:
    """Every name in an expression, as often as it stands there; params that are indexed are not names."""
    if isinstance(expression, Name):
        yield expression.name
    for part in parts_of(expression):
        yield from names_of(part)


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    """What stands directly below an expression."""
    match expression:
        case Unary(_, operand):
            return (operand,)
        case Binary(_, left, right):
            return left, right
        case Call(_, arguments):
            return arguments
        case Index(_, indices):
            return indices
    return ()


def has_key(expression: Expression) -> bool:
    """Whether the value depends on the key."""
    return any(name in _BY_KEY for name in names_of(expression))


def most_keys(found: Alternatives, ranges: Ranges) -> int | None:
    """How many keys a row sees at most, where its bounds are known to be so far apart; None for beyond 2^24."""
    total = 0
    for each in found:
        spreads = [
            _Solver(ranges).difference(upper, lower) for upper in each.uppers for lower in each.lowers or (_ZERO,)
        ]
        widest = [interval(spread, ranges).high + 1 for spread in spreads if spread is not None]
        if not widest:
            return None
        total += max(min(widest), 0)
    return total if total <= _MANY_KEYS else None


def leaves_no_hole(found: KeyRange, ranges: Ranges) -> bool:
    """Whether neighbouring rows together see all keys between the first and the last that any of them sees.

    So it is where the ranges of all rows begin, or end, at the same key, or hold a key that moves with the row.
    """
    if not found.exact or found.tests:
        return False
    lowers = [bound for bound in found.lowers if _varies(bound)]
    uppers = [bound for bound in found.uppers if _varies(bound)]
    if not lowers or not uppers:
        return True
    behind, ahead = ([_from_row(bound, ranges) for bound in bounds] for bounds in (lowers, uppers))
    return all(low is not None and up is not None and low.high <= up.low for low, up in product(behind, ahead))


def reaches_row(found: Alternatives, ranges: Ranges) -> bool:
    """Whether each row sees every key from the first to the one at its own position, at least."""
    for each in found:
        ends = [_from_row(bound, ranges) for bound in each.uppers]
        if _is_left_open(each) and all(end is not None and end.low >= 0 for end in ends):
            return True
    return False


def _varies(bound: Expression) -> bool:
    """Whether a value differs between the rows of a sequence."""
    return any(name in ("q", "q_token") for name in names_of(bound))


def _from_row(bound: Expression, ranges: Ranges) -> Interval | None:
    """How far a bound lies from the row's own position; None where that is not known."""
    inner, offset = _without_offset(bound, ranges)
    match inner:
        case Name("q"):
            return Interval(offset, offset)
        case Binary("*", Binary("//", dividend, Constant(divisor)), Constant(factor)) if divisor == factor > 0:
            found = _from_row(dividend, ranges) if fits(inner, ranges) else None
            return None if found is None else Interval(found.low + offset - int(divisor) + 1, found.high + offset)
    return None


@dataclass(frozen=True, slots=True)
class _Solver:
    ranges: Ranges

    def solve(self, condition: Expression, negated: bool) -> Alternatives:
        """Where the condition holds, or where it does not."""
        truth = known(condition, self.ranges)
        truth = truth.negated if negated else truth
        if truth.must:
            return EVERY_KEY
        if not truth.may:
            return NO_KEY
        if not has_key(condition):
            return self._rows_where(Unary("not", condition, "bool") if negated else condition)
        match condition:
            case Unary("not", operand):
                return self.solve(operand, not negated)
            case Binary("and" | "or" as operator, left, right):
                join = _both if (operator == "and") != negated else _either
                return join(self.solve(left, negated), self.solve(right, negated))
            case Call("where", (test, taken, otherwise)):
                first = _both(self.solve(test, False), self.solve(taken, negated))
                return _either(first, _both(self.solve(test, True), self.solve(otherwise, negated)))
            case Binary(operator, left, right) if left.type in ("int32", "int64") and right.type in ("int32", "int64"):
                operator = _NEGATIONS[operator] if negated else operator
                if has_key(left) and has_key(right):
                    return UNSOLVED
                if has_key(right):
                    left, operator, right = right, _MIRRORED[operator], left
                return self.compare(left, operator, right)
        return UNSOLVED

    @staticmethod
    def _rows_where(condition: Expression) -> Alternatives:
        """All keys for the rows where a condition without a key holds, and none for the others."""
        last = Constant(LAST_KEY, "int32")
        return (KeyRange(uppers=(Call("where", (condition, last, Constant(-1, "int32")), "int32"),)),)

    def compare(self, left: Expression, operator: str, right: Expression | None) -> Alternatives:
        """Where `left operator right` holds; only `left` has the key. None stands for what cannot be computed."""
        if right is None:
            return UNSOLVED
        if isinstance(left, Index) and left.indices == (Name("kv_token", "int32"),):
            return (KeyRange(tests=(ElementTest(left, operator, right),)),)
        if operator == "==":
            return _both(self.compare(left, "<=", right), self.compare(left, ">=", right))
        if operator == "!=":
            return _either(self.compare(left, "<", right), self.compare(left, ">", right))
        if operator == "<":
            return self.compare(left, "<=", self.sum(right, Constant(-1, "int32")))
        if operator == ">":
            return self.compare(left, ">=", self.sum(right, Constant(1, "int32")))
        if isinstance(left, Name):
            if left.name == "kv_token":
                right = self.difference(right, Name("kv_start", "int32"))
            if right is None:
                return UNSOLVED
            if operator == "<=":
                return (KeyRange(uppers=(right,)),)
            return EVERY_KEY if isinstance(right, Constant) and right.value <= 0 else (KeyRange(lowers=(right,)),)
        return self._undo(left, operator, right) if fits(left, self.ranges) else UNSOLVED

    def _undo(self, left: Expression, operator: str, right: Expression) -> Alternatives:
        """Take the outermost operator off `left`; the comparison is `<=` or `>=`."""
        mirrored = _MIRRORED[operator]
        match left:
            case Unary("-", inner):
                return self.compare(inner, mirrored, self.negative(right))
            case Binary("+", inner, other) if not has_key(other):
                return self.compare(inner, operator, self.difference(right, other))
            case Binary("+", other, inner) if not has_key(other):
                return self.compare(inner, operator, self.difference(right, other))
            case Binary("-", inner, other) if not has_key(other):
                return self.compare(inner, operator, self.sum(right, other))
            case Binary("-", other, inner) if not has_key(other):
                return self.compare(inner, mirrored, self.difference(other, right))
            case Binary("*", inner, Constant(factor)) | Binary("*", Constant(factor), inner) if factor:
                if factor < 0:
                    return self._product(inner, mirrored, self.negative(right), -int(factor))
                return self._product(inner, operator, right, int(factor))
            case Binary("//", inner, Constant(divisor)) if divisor > 0:
                first = self.product(right, Constant(divisor, "int32"))
                past = Constant(int(divisor) - 1, "int32")
                return self.compare(inner, operator, self.sum(first, past) if operator == "<=" else first)
            case Call("min" | "max" as function, arguments):
                found = [self._branch(argument, operator, right) for argument in arguments]
                return reduce(_either if (function == "min") == (operator == "<=") else _both, found)
            case Call("abs", (inner,)):
                join = _both if operator == "<=" else _either
                return join(self.compare(inner, operator, right), self.compare(inner, mirrored, self.negative(right)))
            case Call("where", (test, taken, otherwise)):
                first = _both(self.solve(test, False), self._branch(taken, operator, right))
                return _either(first, _both(self.solve(test, True), self._branch(otherwise, operator, right)))
        return UNSOLVED

    def _branch(self, left: Expression, operator: str, right: Expression) -> Alternatives:
        return self.solve(Binary(operator, left, right, "bool"), False)  # type: ignore[arg-type]

    def _product(self, inner: Expression, operator: str, right: Expression | None, factor: int) -> Alternatives:
        """`inner * factor` compared with `right`, for a positive factor."""
        if right is None:
            return UNSOLVED
        if operator == "<=":
            return self.compare(inner, operator, self.quotient(right, factor))
        return self.compare(inner, operator, self.negative(self.quotient(self.negative(right), factor)))

    # Values without a key; what may not fit 64 bits is None.

    def sum(self, left: Expression | None, right: Expression) -> Expression | None:
        if left is None:
            return None
        if isinstance(left, Constant) and not isinstance(right, Constant):
            left, right = right, left
        if isinstance(right, Constant):
            if isinstance(left, Constant):
                return self._constant(left.value + right.value)
            number = int(right.value)
            inner, offset = _without_offset(left, self.ranges)
            number += offset
            if number == 0:
                return inner
            sign = "+" if number > 0 else "-"
            constant = self._constant(abs(number))
            return None if constant is None else self._made(sign, inner, constant)
        return self._made("+", left, right)

    def difference(self, left: Expression | None, right: Expression | None) -> Expression | None:
        if left is None or right is None:
            return None
        if isinstance(right, Constant):
            return self.sum(left, Constant(-right.value, "int32"))
        inner, offset = _without_offset(left, self.ranges)
        if inner == _without_offset(right, self.ranges)[0]:
            return self._constant(offset - _without_offset(right, self.ranges)[1])
        if isinstance(inner, Constant) or offset == 0:
            subtracted, other = _without_offset(right, self.ranges)
            if other and not isinstance(left, Constant):
                found = self._made("-", left, subtracted)
                return self.sum(found, Constant(-other, "int32"))
            return self.negative(right) if left == Constant(0, "int32") else self._made("-", left, right)
        return self.sum(self._made("-", inner, right), Constant(offset, "int32"))

    def negative(self, operand: Expression | None) -> Expression | None:
        if operand is None:
            return None
        if isinstance(operand, Constant):
            return self._constant(-operand.value)
        if isinstance(operand, Binary) and operand.operator == "-" and fits(operand, self.ranges):
            return self._made("-", operand.right, operand.left)
        return self._checked(Unary("-", operand, operand.type), Unary("-", operand, "int64"))

    def product(self, left: Expression, right: Constant) -> Expression | None:
        if isinstance(left, Constant):
            return self._constant(left.value * right.value)
        return self._made("*", left, right)

    def quotient(self, left: Expression | None, divisor: int) -> Expression | None:
        if left is None:
            return None
        if isinstance(left, Constant):
            return self._constant(left.value // divisor)
        return left if divisor == 1 else self._made("//", left, Constant(divisor, "int32"))

    @staticmethod
    def _constant(number: int | float) -> Expression | None:
        if not -(2**63) <= number < 2**63:
            return None
        return Constant(int(number), "int32" if -(2**31) <= number < 2**31 else "int64")

    def _made(self, operator: str, left: Expression, right: Expression) -> Expression | None:
        kind = "int64" if "int64" in (left.type, right.type) else "int32"
        narrow = Binary(operator, left, right, kind)  # type: ignore[arg-type]
        return self._checked(narrow, replace(narrow, type="int64"))

    def _checked(self, narrow: Expression, wide: Expression) -> Expression | None:
        if fits(narrow, self.ranges):
            return narrow
        return wide if fits(wide, self.ranges) else None


def _without_offset(expression: Expression, ranges: Ranges) -> tuple[Expression, int]:
    """`x + 5` as `x` and 5, where it does not wrap."""
    if isinstance(expression, Binary) and isinstance(expression.right, Constant) and fits(expression, ranges):
        if expression.operator == "+":
            return expression.left, int(expression.right.value)
        if expression.operator == "-":
            return expression.left, -int(expression.right.value)
    return expression, 0


def _both(left: Alternatives, right: Alternatives) -> Alternatives:
    found = tuple(_narrowed(a, b) for a, b in product(left, right))
    return found if len(found) <= _MOST_ALTERNATIVES else (hull(found),)


def _narrowed(a: KeyRange, b: KeyRange) -> KeyRange:
    return KeyRange(
        tuple(dict.fromkeys(a.lowers + b.lowers)),
        tuple(dict.fromkeys(a.uppers + b.uppers)),
        tuple(dict.fromkeys(a.tests + b.tests)),
        a.exact and b.exact,
    )


def _either(left: Alternatives, right: Alternatives) -> Alternatives:
    found = _merged(tuple(dict.fromkeys(left + right)))
    return found if len(found) <= _MOST_ALTERNATIVES else (hull(found),)


def _merged(found: Alternatives) -> Alternatives:
    """Ranges that begin, or end, without a bound are one range up to the larger end, or from the smaller start."""
    if KeyRange() in found:
        return EVERY_KEY
    return _joined(_joined(found, _is_left_open, _up_to_either), _is_right_open, _from_either)


def _joined(
    found: Alternatives, is_open: Callable[[KeyRange], bool], join: Callable[[list[KeyRange]], KeyRange]
) -> Alternatives:
    chosen = [each for each in found if is_open(each)]
    if len(chosen) < 2:
        return found
    return (join(chosen), *(each for each in found if each not in chosen))


def _is_left_open(found: KeyRange) -> bool:
    return found.exact and not found.lowers and not found.tests


def _is_right_open(found: KeyRange) -> bool:
    return found.exact and not found.uppers and not found.tests


def _up_to_either(found: list[KeyRange]) -> KeyRange:
    return KeyRange(uppers=(combined("max", [combined("min", each.uppers) for each in found]),))


def _from_either(found: list[KeyRange]) -> KeyRange:
    return KeyRange(lowers=(combined("min", [combined("max", each.lowers) for each in found]),))


def hull(found: Alternatives) -> KeyRange:
    """One range around several, which need not be exact any more."""
    lowers = [combined("max", each.lowers) for each in found if each.lowers]
    uppers = [combined("min", each.uppers) for each in found if each.uppers]
    return KeyRange(
        (combined("min", lowers),) if len(lowers) == len(found) else (),
        (combined("max", uppers),) if len(uppers) == len(found) else (),
        exact=False,
    )


def combined(function: str, values: list[Expression] | tuple[Expression, ...]) -> Expression:
    """The least or the largest of some values."""
    distinct = tuple(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    kind = "int64" if any(each.type == "int64" for each in distinct) else "int32"
    return Call(function, distinct, kind)
