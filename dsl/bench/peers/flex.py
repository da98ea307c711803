"""FlexAttention, compiled for each shape anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsl.bench.peers.work import Attention, Work

_MOST_SHAPES = 256


@dataclass(frozen=True)
class Flex:
    name: str
    origin: str
    compiled: Callable[..., torch.Tensor]

    def bind(self, work: Work) -> Attention:
        q, k, v = work.padded()
        gqa = work.spec.group > 1
        return lambda: self.compiled(q, k, v, scale=work.scale, enable_gqa=gqa).transpose(1, 2)


def find(name: str, **_: Any) -> Flex:
    """The compiled function; past the limit of shapes it raises, where torch would go on uncompiled."""
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = _MOST_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return Flex(name, f"torch {torch.__version__}", torch.compile(flex_attention, dynamic=False))
