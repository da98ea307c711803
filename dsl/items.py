"""From text to items: tokens, and where one item ends and the next begins.

An item is what the parser takes at once: the head of a block, a field, a param, a dispatch or a closing brace. The cut
needs no parse, so an item that is wrong leaves its neighbours alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lark import Lark, Token
from lark.lexer import BasicLexer, LexerThread

from dsl.source import Span

MOST_TOKENS = 20_000

HEADS = ("ATTENTION", "WORKLOAD")
OPENING = ("LPAR", "LSQB")
CLOSING = ("RPAR", "RSQB")

_KEYWORDS_OF_ITEMS = (*HEADS, "DISPATCH", "PARAM")
_STARTS = ["attention", "workload", "dispatch", "field", "param", "others"]


def grammar(builder: object) -> Lark:
    """The parser. `builder` has a method for each rule, called as the rule is recognised."""
    return Lark(
        Path(__file__).with_name("grammar.lark").read_text("utf-8"),
        parser="lalr",
        lexer="basic",
        start=_STARTS,
        transformer=builder,
        keep_all_tokens=True,
        maybe_placeholders=False,
    )


@lru_cache(maxsize=1)
def _lexer(lark: Lark) -> BasicLexer:
    return BasicLexer(lark.lexer_conf)


def span_of(token: Token) -> Span:
    return Span(token.start_pos or 0, token.end_pos or 0)


def tokenize(lark: Lark, text: str) -> Iterator[Token]:
    """Every word, number and sign. Whatever else stands in the text is a `STRANGE` or a `MALFORMED_NUMBER`."""
    return LexerThread.from_text(_lexer(lark), text).lex(None)


def cut(tokens: list[Token]) -> Iterator[list[Token]]:
    """Cut the tokens into items.

    Outside brackets `NAME =` or `NAME :`, and anywhere `param` or a keyword of a block, starts an item; `{` ends the
    head of a block, and the `}` that answers it is an item of its own.
    """
    item: list[Token] = []
    brackets = braces = 0
    for position, token in enumerate(tokens):
        if item and _starts_item(tokens, position, outside=brackets == 0):
            yield item
            item, brackets, braces = [], 0, 0
        if token.type == "RBRACE" and braces == 0:
            if item:
                yield item
            yield [token]
            item, brackets = [], 0
            continue
        item.append(token)
        if token.type == "LBRACE" and item[0].type in HEADS:
            yield item
            item, brackets, braces = [], 0, 0
        elif token.type in OPENING:
            brackets += 1
        elif token.type in CLOSING:
            brackets = max(0, brackets - 1)
        elif token.type == "LBRACE":
            braces += 1
        elif token.type == "RBRACE":
            braces -= 1
    if item:
        yield item


def _starts_item(tokens: list[Token], position: int, outside: bool) -> bool:
    token = tokens[position]
    if token.type in _KEYWORDS_OF_ITEMS:
        return True
    if not outside or token.type != "NAME" or position + 1 == len(tokens):
        return False
    before, after = tokens[position - 1].type, tokens[position + 1].type
    return (after == "EQUAL" and before != "DISPATCH") or (after == "COLON" and before != "PARAM")
