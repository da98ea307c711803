"""FlashAttention-4, written in CuTe DSL; it compiles at the first call of a shape's kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsl.bench.peers.flash_attention_3 import varlen
from dsl.bench.peers.libraries import described, library
from dsl.bench.peers.work import Attention, Work


@dataclass(frozen=True)
class FlashAttention4:
    name: str
    origin: str
    prefill: Callable[[Work], Attention]

    def bind(self, work: Work) -> Attention:
        return self.prefill(work)


def find(name: str, **_: Any) -> FlashAttention4:
    """Raises Absent."""
    module = library("flash_attn.cute.interface")
    return FlashAttention4(name, described(module), varlen(module))
