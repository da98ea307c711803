"""cuDNN and FlashAttention-2 as torch brings them, behind `scaled_dot_product_attention`."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dsl.bench.peers.work import Absent, Attention, Refused, Work

_NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch's error begins where it has no kernel, on a GPU and elsewhere."""


@dataclass(frozen=True)
class Sdpa:
    """One backend of torch's operator."""

    name: str
    origin: str
    backend: SDPBackend
    title: str

    def bind(self, work: Work) -> Attention:
        q, k, v = work.padded()
        gqa = work.spec.group > 1

        def attention() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                out = scaled_dot_product_attention(q, k, v, scale=work.scale, enable_gqa=gqa)
            return out.transpose(1, 2)

        self._try(attention)
        return attention

    def _try(self, attention: Attention) -> None:
        """Call it once. Where the backend has no kernel, torch says so in an error and why in warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                attention()
            except RuntimeError as error:
                if not str(error).startswith(_NO_KERNEL):
                    raise
                reason = self._reason([str(warning.message) for warning in caught])
                raise Refused(f"torch has no {self.title} kernel for it{reason}") from error

    def _reason(self, warned: list[str]) -> str:
        """What torch says behind the line `<title> kernel not used because:`."""
        for header, reason in itertools.pairwise(warned):
            if header.lower().startswith(f"{self.title} attention kernel not used".lower()):
                return f": {reason.partition(' (Triggered internally')[0]}"
        return ""


def find(name: str, **_: Any) -> Sdpa:
    """`cudnn` or `fa2`. Raises Absent."""
    if name == "fa2":
        return Sdpa(name, f"torch {torch.__version__}", SDPBackend.FLASH_ATTENTION, "Flash")
    if torch.version.hip or not torch.backends.cudnn.is_available():
        raise Absent("this torch has no cuDNN")
    origin = f"cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}"
    return Sdpa(name, origin, SDPBackend.CUDNN_ATTENTION, "cuDNN")
