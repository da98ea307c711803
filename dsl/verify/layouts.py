"""Axis lists read the plain way: a tensor as it lies in memory, and the same tensor by its logical axes.

This is the oracle's own reading of a layout; it shares nothing with the code that prints addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsl.spec import Layout


def to_logical(tensor: torch.Tensor, layout: Layout, axes: Sequence[str]) -> torch.Tensor:
    """The tensor with `axes` in that order, split axes joined; an axis that the layout lacks has extent 1."""
    order = [
        position
        for name in axes
        for _, position in sorted(
            (axis.part == "inner", position) for position, axis in enumerate(layout) if axis.name == name
        )
    ]
    shape = []
    for name in axes:
        extent = 1
        for axis, size in zip(layout, tensor.shape, strict=True):
            extent *= size if axis.name == name else 1
        shape.append(extent)
    return tensor.permute(order).reshape(shape)


def to_physical(tensor: torch.Tensor, layout: Layout, axes: Sequence[str]) -> torch.Tensor:
    """The inverse: a logical tensor of `axes` as a contiguous tensor of the layout's shape."""
    names: list[tuple[str, str]] = []
    shape: list[int] = []
    for name, extent in zip(axes, tensor.shape, strict=True):
        factor = next((axis.factor for axis in layout if axis.name == name and axis.part != "whole"), None)
        if factor is None:
            names.append((name, "whole"))
            shape.append(extent)
        else:
            names += [(name, "outer"), (name, "inner")]
            shape += [extent // factor, factor]
    present = [(axis.name, axis.part) for axis in layout]
    lacking = [position for position, name in enumerate(names) if name not in present]
    order = [names.index(name) for name in present]
    return tensor.reshape(shape).permute(order + lacking).reshape([shape[i] for i in order]).contiguous()
