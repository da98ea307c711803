"""What a GPU has, as data: the only place that knows a chip by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One chip. `shared_bytes` is what one block may use; `backend` and `warp_size` are Triton's words."""

    name: str
    backend: str
    shared_bytes: int
    warp_size: int

    @property
    def is_amd(self) -> bool:
        return self.backend == "hip"


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("sm80", "cuda", 163 * 1024, 32),
    Architecture("sm86", "cuda", 99 * 1024, 32),
    Architecture("sm89", "cuda", 99 * 1024, 32),
    Architecture("sm90", "cuda", 227 * 1024, 32),
    Architecture("sm100", "cuda", 227 * 1024, 32),
    Architecture("sm120", "cuda", 99 * 1024, 32),
    Architecture("gfx90a", "hip", 64 * 1024, 64),
    Architecture("gfx942", "hip", 64 * 1024, 64),
    Architecture("gfx950", "hip", 160 * 1024, 64),
    Architecture("gfx1100", "hip", 64 * 1024, 32),
    Architecture("gfx1151", "hip", 64 * 1024, 32),
    Architecture("gfx1201", "hip", 64 * 1024, 32),
)

# A chip that is not listed gets the configuration that fits the smallest of them.
UNLISTED = Architecture("other", "cuda", min(chip.shared_bytes for chip in ARCHITECTURES), 32)


def architecture(name: str) -> Architecture:
    """Look one up by name. Raises KeyError."""
    for chip in ARCHITECTURES:
        if chip.name == name:
            return chip
    raise KeyError(name)
