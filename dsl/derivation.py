"""What the plan knows of a mask, in words: from where to where a row sees keys, and which tiles follow from it."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.expr.tiles import Visit, visit
from dsl.expr.visible import Alternatives, ElementTest, KeyRange, combined, names_of
from dsl.plan.module import BlockPlan
from dsl.printer import print_expression
from dsl.spec import Spec


def derivation(block: BlockPlan, block_q: int, block_kv: int, q_len: int, kv_len: int) -> Iterator[str]:
    """Sentences about a block's mask, the last about the middle tile of rows of a sequence of such lengths."""
    shaping = block.kernel.shaping  # type: ignore[attr-defined]
    yield print_expression(block.spec.mask)
    found: Alternatives = shaping.alternatives
    if not found:
        yield "no row sees a key, and no tile is visited"
        return
    if not shaping.masked:
        yield "every key of the sequence: the one query is the last token, and the mask is left out"
        return
    yield f"a row sees {' and '.join(map(_range, found))}{_most(block)}"
    yield from _rule(block.spec, found, block_q, block_kv)
    if _is_known(found):
        yield _example(block.spec, found, block_q, block_kv, q_len, kv_len)


def _range(found: KeyRange) -> str:
    lower = print_expression(combined("max", found.lowers)) if found.lowers else "0"
    upper = print_expression(combined("min", found.uppers)) if found.uppers else "kv_len - 1"
    tests = "".join(f", where {_test(test)}" for test in found.tests)
    some = "" if found.exact else " some of"
    return f"{some} the keys from {lower} to {upper}{tests}".strip()


def _test(test: ElementTest) -> str:
    return f"{print_expression(test.element)} {test.operator} {print_expression(test.value)}"


def _most(block: BlockPlan) -> str:
    most = block.expressions.most_keys
    return f", {most} at most" if most is not None else ""


def _rule(spec: Spec, found: Alternatives, block_q: int, block_kv: int) -> Iterator[str]:
    rows = "one query" if spec.query == "single" else f"{block_q} rows"
    each = "each range is" if len(found) > 1 else "they are"
    yield (
        f"tiles of {block_kv} keys: {each} visited from that of the least first key of {rows} to that of the greatest "
        f"last key; the others are empty"
    )
    if spec.query == "single":
        yield "every visited tile is tested: the test costs nothing beside the loads"
    elif any(each.exact for each in found):
        yield "those between the greatest first key and the least last key are full, and run without a test"
    else:
        yield "none is known to be full: a part of the mask is not solved for the key"
    if any(each.tests for each in found):
        yield (
            "another kernel first finds the least and the greatest element of each tile: a tile is empty where they "
            "and the rows' exclude each other, and full where they can only agree"
        )


def _is_known(found: Alternatives) -> bool:
    """Whether the bounds follow from positions and lengths alone."""
    known = {"q", "kv_len", "q_len"}
    expressions = [bound for each in found for bound in (*each.lowers, *each.uppers)]
    simple = all(set(names_of(bound)) <= known and "[" not in print_expression(bound) for bound in expressions)
    return simple and not any(each.tests for each in found)


def _example(spec: Spec, found: Alternatives, block_q: int, block_kv: int, q_len: int, kv_len: int) -> str:
    first = 0 if spec.query == "single" else q_len // 2 // block_q * block_q
    count = 1 if spec.query == "single" else min(block_q, q_len - first)
    start = kv_len - q_len + first
    rows = [{"q": start + row, "kv_len": kv_len, "q_len": q_len} for row in range(count)]
    one = visit(found, rows, kv_len, block_kv, lambda param, indices: 0)
    where = f"q = {start}" if count == 1 else f"q from {start} to {start + count - 1}"
    return f"with {kv_len} keys, {where}: {visited(one, -(-kv_len // block_kv), spec.query != 'single')}"


def visited(one: Visit, total: int, has_full: bool) -> str:
    """`tiles 62 to 65 of 128, 2 of them full`."""
    if not one.tiles:
        return f"none of {total} tiles"
    runs = _runs(one.tiles)
    text = " and ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    full = f", {len(one.full)} of them full" if has_full else ""
    return f"{'tile' if len(one.tiles) == 1 else 'tiles'} {text} of {total}{full}"


def _runs(tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for tile in tiles:
        if runs and runs[-1][1] == tile - 1:
            runs[-1] = (runs[-1][0], tile)
        else:
            runs.append((tile, tile))
    return runs
