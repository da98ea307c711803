"""How a head dimension is cut into powers of two, and how large tiles are on each architecture."""

from __future__ import annotations

from dsl.layout import DimPiece

LOG2_E = 1.4426950408889634
MINIMUM_DOT = 16
MAXIMUM_PIECES = 3


def next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def cut(dim: int) -> tuple[int, ...]:
    """The powers of two, each at least what a dot needs, that cover `dim` with the least padding, then the fewest."""
    whole = max(next_power_of_two(dim), MINIMUM_DOT)
    best = (whole,)
    head = whole // 2
    if head >= MINIMUM_DOT:
        rest = _cut_rest(dim - head, MAXIMUM_PIECES - 1)
        if head + sum(rest) < whole:
            best = (head, *rest)
    return best


def _cut_rest(dim: int, pieces: int) -> tuple[int, ...]:
    whole = max(next_power_of_two(dim), MINIMUM_DOT)
    head = whole // 2
    if pieces == 1 or head < MINIMUM_DOT or head >= dim:
        return (whole,)
    rest = _cut_rest(dim - head, pieces - 1)
    return (head, *rest) if head + sum(rest) < whole else (whole,)


def pieces(dim: int, name: str, prefix: str) -> tuple[tuple[DimPiece, ...], dict[str, int]]:
    """The pieces of a head dimension and the constants that name their sizes.

    A dimension that is a power of two is one piece, called by the dimension's own name.
    """
    sizes = cut(dim)
    if sizes == (dim,):
        return (DimPiece("", name, "0", dim, 0, None),), {name: dim}
    if len(sizes) == 1:
        padded = f"{prefix}PADDED"
        return (DimPiece("", padded, "0", sizes[0], 0, name),), {name: dim, padded: sizes[0]}
    constants = {name: dim}
    result = []
    for number, size in enumerate(sizes):
        constant, offset = f"{prefix}{number}", sum(sizes[:number])
        start = " + ".join(f"{prefix}{before}" for before in range(number)) or "0"
        overhangs = offset + size > dim
        constants[constant] = size
        result.append(DimPiece(f"_{number}", constant, start, size, offset, name if overhangs else None))
    return tuple(result), constants


def head_dim_pieces(dim_qk: int, dim_v: int) -> tuple[tuple[DimPiece, ...], tuple[DimPiece, ...], dict[str, int]]:
    """Pieces of the QK and the V dimension and the constants of both; equal dimensions share their names."""
    if dim_qk == dim_v:
        both, constants = pieces(dim_qk, "HEAD_DIM", "DIM_")
        return both, both, constants
    qk, qk_constants = pieces(dim_qk, "HEAD_DIM_QK", "QK_DIM_")
    v, v_constants = pieces(dim_v, "HEAD_DIM_V", "V_DIM_")
    return qk, v, {**qk_constants, **v_constants}
