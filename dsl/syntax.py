"""From text to the syntax tree. Every item is parsed on its own, so one run reports what is wrong with each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from lark import Lark, Token, UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from dsl import wording
from dsl.diagnostics import MOST_FINDINGS, Diagnostic
from dsl.items import CLOSING, HEADS, MOST_TOKENS, OPENING, cut, grammar, span_of, tokenize
from dsl.nodes import (
    Argument,
    Attention,
    Binary,
    Block,
    Call,
    Chain,
    Dispatch,
    Field,
    File,
    Index,
    List,
    Name,
    Number,
    Operator,
    Param,
    Scaled,
    Unary,
    Value,
    Workload,
)
from dsl.source import MOST_BYTES, Source, Span

DEEPEST_NESTING = 100
DEEPEST_TREE = 200
LARGEST_INTEGER = 2**31 - 1
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127


def parse(source: Source) -> File:
    """Parse a spec. Never raises: what cannot be parsed is in the result's `diagnostics`."""
    if len(source.data) > MOST_BYTES:
        end = len(source.text)
        return File((), source, (wording.too_many_bytes(Span(end, end), MOST_BYTES),))
    tokens = tokens_of(source)
    if len(tokens) > MOST_TOKENS:
        return File((), source, (wording.too_many_tokens(span_of(tokens[-1]), MOST_TOKENS),))
    assembly = _Assembly(_parser())
    for item in cut(tokens):
        assembly.add(item)
        if len(assembly.diagnostics) > MOST_FINDINGS:
            break
    else:
        assembly.end(tokens)
    return File(tuple(assembly.blocks), source, tuple(assembly.diagnostics), frozenset(assembly.broken))


def tokens_of(source: Source) -> list[Token]:
    """The tokens of a spec; one more than it may have where it has too many."""
    return list(islice(tokenize(_parser(), source.text), MOST_TOKENS + 1))


class _Refusal(Exception):
    """An item cannot be parsed."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic


@dataclass
class _Open:
    """A block whose closing brace is yet to come."""

    kind: str
    name: Name | None
    base: Name | None
    span: Span
    fields: list[Field] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def block(self) -> Block:
        broken = frozenset(self.broken)
        if self.kind == "WORKLOAD":
            return Workload(self.name, tuple(self.fields), self.span, broken)
        return Attention(self.name, self.base, tuple(self.fields), tuple(self.params), self.span, broken)


class _Assembly:
    """Puts parsed items together to blocks."""

    def __init__(self, lark: Lark) -> None:
        self.lark = lark
        self.blocks: list[Block] = []
        self.diagnostics: list[Diagnostic] = []
        self.broken: set[str] = set()
        self.open: _Open | None = None
        self.stray = False
        self.accepted: dict[tuple, set[str]] = {}

    def add(self, item: list[Token]) -> None:
        kind = item[0].type
        if kind in HEADS:
            self._close(item[0])
            self._head(item)
        elif kind == "DISPATCH":
            self._close(item[0])
            self._dispatch(item)
        elif kind == "RBRACE":
            self._brace(item[0])
        elif self.open is None:
            self._outside(item)
        else:
            self._body(self.open, item)

    def end(self, tokens: list[Token]) -> None:
        if tokens:
            self._close(tokens[-1], at_end=True)

    def _head(self, item: list[Token]) -> None:
        self.stray = False
        kind = item[0].type
        head = self._parse(kind.lower(), item)
        if head is None:
            self.broken |= _names(item)
            self.open = _Open(kind, None, None, span_of(item[0]))
        else:
            name, base = head
            self.open = _Open(kind, name, base, span_of(item[0]).to(span_of(item[-1])))

    def _dispatch(self, item: list[Token]) -> None:
        self.stray = False
        dispatch = self._parse("dispatch", item)
        if dispatch is None:
            self.broken |= _names(item)
        else:
            self.blocks.append(dispatch)

    def _brace(self, brace: Token) -> None:
        if self.open is not None:
            self.blocks.append(self.open.block())
            self.open = None
        elif not self.stray:
            self.diagnostics.append(wording.stray_brace(span_of(brace)))

    def _outside(self, item: list[Token]) -> None:
        """Something that belongs in a block; only the first of several in a row is worth a word."""
        self.broken |= _names(item)
        if not self.stray:
            self.stray = True
            self.diagnostics.append(wording.outside(item))

    def _body(self, block: _Open, item: list[Token]) -> None:
        if item[0].type != "PARAM":
            parsed = self._parse("field", item)
            into = block.fields
        elif block.kind == "WORKLOAD":
            self.diagnostics.append(wording.param_in_workload(span_of(item[0])))
            return
        else:
            parsed = self._parse("param", item)
            into = block.params
        if parsed is None:
            block.broken |= _names(item)
        else:
            into.append(parsed)

    def _close(self, token: Token, at_end: bool = False) -> None:
        """The text goes on, or ends, with `token`; a block that is still open lacks its brace."""
        if self.open is None:
            return
        if self.open.name is not None:
            end = span_of(token).end
            place = Span(end, end) if at_end else span_of(token)
            self.diagnostics.append(wording.unclosed(self.open.kind.lower(), self.open.name, place, self.open.span))
        self.blocks.append(self.open.block())
        self.open = None

    def _parse(self, start: str, item: list[Token]):
        """The node of an item, or None and a diagnostic."""
        try:
            return self._feed(start, item)
        except _Refusal as refusal:
            self.diagnostics.append(refusal.diagnostic)
            return None

    def _feed(self, start: str, item: list[Token]):
        parser = self.lark.parse_interactive(start=start)
        nesting = _Nesting()
        for position, token in enumerate(item):
            _readable(token)
            nesting.count(token)
            try:
                parser.feed_token(token)
            except UnexpectedToken:
                raise _Refusal(wording.unexpected(start, item, position, self._accepts(parser))) from None
        try:
            return parser.feed_eof(item[-1])
        except UnexpectedToken:
            raise _Refusal(wording.unfinished(start, item, self._accepts(parser))) from None

    def _accepts(self, parser: InteractiveParser) -> set[str]:
        """The terminals that may follow; to find them is slow, and one mistake is often made many times."""
        key = tuple(parser.parser_state.state_stack)
        if key not in self.accepted:
            self.accepted[key] = parser.accepts()
        return self.accepted[key]


def _names(item: list[Token]) -> set[str]:
    return {str(token) for token in item if token.type == "NAME"}


def _readable(token: Token) -> None:
    if token.type == "STRANGE":
        raise _Refusal(wording.strange_character(token))
    if token.type == "MALFORMED_NUMBER":
        raise _Refusal(wording.malformed_number(token))
    if token.type == "NUMBER" and _is_too_large(token):
        raise _Refusal(wording.number_too_large(span_of(token)))


def _is_too_large(number: Token) -> bool:
    digits = number.lstrip("0")
    if digits.isdigit():
        return len(digits) > 10 or int(digits) > LARGEST_INTEGER
    return float(number) > LARGEST_FLOAT


class _Nesting:
    """Counts brackets and signs that stand inside one another."""

    def __init__(self) -> None:
        self.depth = 0
        self.opened: list[int] = []
        self.signs = 0
        self.after_operand = False

    def count(self, token: Token) -> None:
        kind = token.type
        if kind in OPENING:
            self.opened.append(self.signs + 1)
            self.depth += self.signs + 1
            self.signs, self.after_operand = 0, False
        elif kind in CLOSING:
            self.depth -= self.opened.pop() if self.opened else 0
            self.signs, self.after_operand = 0, True
        elif kind == "NOT" or (kind == "MINUS" and not self.after_operand):
            self.signs += 1
        else:
            self.signs, self.after_operand = 0, kind in ("NAME", "NUMBER")
        if self.depth + self.signs > DEEPEST_NESTING:
            raise _Refusal(wording.too_deep(span_of(token), f"nested more than {DEEPEST_NESTING} deep"))


@lru_cache(maxsize=1)
def _parser() -> Lark:
    return grammar(_Builder())


def _number(token: Token) -> Number:
    text = str(token)
    return Number(int(text) if text.isdigit() else float(text), span_of(token))


def _name(token: Token) -> Name:
    return Name(str(token), span_of(token))


def _operator(token: Token) -> Operator:
    return Operator(str(token), span_of(token))


def _deeper(place: Operator, *parts: Value) -> int:
    depth = 1 + max(part.depth for part in parts)
    if depth > DEEPEST_TREE:
        raise _Refusal(wording.too_deep(place.span, f"longer than {DEEPEST_TREE} operators"))
    return depth


class _Builder:
    """A method a rule: the node for what the parser has recognised. Children are tokens and nodes, in order."""

    def attention(self, children) -> tuple[Name, Name | None]:
        return _name(children[1]), _name(children[3]) if children[2].type == "FROM" else None

    def workload(self, children) -> tuple[Name, None]:
        return _name(children[1]), None

    def dispatch(self, children) -> Dispatch:
        keyword, name, _, blocks = children
        return Dispatch(_name(name), blocks, span_of(keyword).to(blocks.span))

    def field(self, children) -> Field:
        name, _, value = children
        return Field(_name(name), value, span_of(name).to(value.span))

    def param(self, children) -> Param:
        axes = children[2] if isinstance(children[2], List) else None
        return Param(_name(children[1]), axes, _name(children[-1]), span_of(children[0]).to(span_of(children[-1])))

    def scaled(self, children) -> Scaled:
        dtype, _, axes = children
        return Scaled(_name(dtype), axes, span_of(dtype).to(axes.span))

    def binary(self, children) -> Binary:
        left, sign, right = children
        operator = _operator(sign)
        return Binary(operator, left, right, left.span.to(right.span), _deeper(operator, left, right))

    def unary(self, children) -> Unary:
        sign, operand = children
        operator = _operator(sign)
        return Unary(operator, operand, operator.span.to(operand.span), _deeper(operator, operand))

    def chain(self, children) -> Chain:
        left, sign, right = children
        operator = _operator(sign)
        return Chain((left, right), (operator,), left.span.to(right.span), _deeper(operator, left, right))

    def longer_chain(self, children) -> Chain:
        chain, sign, right = children
        operator = _operator(sign)
        operands, operators = (*chain.operands, right), (*chain.operators, operator)
        return Chain(operands, operators, chain.span.to(right.span), _deeper(operator, chain, right))

    def number(self, children) -> Number:
        return _number(children[0])

    def name(self, children) -> Name:
        return _name(children[0])

    def index(self, children) -> Index:
        name, indices = children
        return Index(_name(name), indices, span_of(name).to(indices.span), indices.depth)

    def call(self, children) -> Call:
        function, arguments = _name(children[0]), children[2] if len(children) == 4 else ()
        depth = 1 + max((argument.value.depth for argument in arguments), default=0)
        return Call(function, arguments, function.span.to(span_of(children[-1])), depth)

    def group(self, children) -> Value:
        opening, inner, closing = children
        return replace(inner, span=span_of(opening).to(span_of(closing)))

    def list(self, children) -> List:
        items = tuple(child for child in children if not isinstance(child, Token))
        depth = 1 + max((item.depth for item in items), default=0)
        return List(items, span_of(children[0]).to(span_of(children[-1])), depth)

    def arguments(self, children) -> tuple[Argument, ...]:
        return tuple(child for child in children if not isinstance(child, Token))

    def argument(self, children) -> Argument:
        if len(children) == 1:
            return Argument(None, children[0])
        return Argument(_name(children[0]), children[2])
