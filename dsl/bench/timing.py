"""Everything that is said to a GPU in order to time it stands here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import triton

from dsl.bench.measure import Call, Machine
from dsl.verify.placement import DTYPES

_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_MATMUL = 8192


class NoGpu(Exception):
    """There is nothing to time on."""


class Gpu:
    """The current GPU as a clock. Raises NoGpu where there is none."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NoGpu("no GPU: there is nothing to time on")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"sm{properties.major}{properties.minor}"
        self.machine = Machine(
            gpu=properties.name,
            architecture=properties.gcnArchName.partition(":")[0] if torch.version.hip else capability,
            processors=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            torch=torch.__version__,
            triton=triton.__version__,
        )
        self._flush = torch.empty(max(_FLUSH_BYTES, 4 * self.machine.l2_bytes), dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def sample(self, run: Call) -> float:
        """Seconds of the device for one run, which finds nothing of its own in the L2 cache."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    def wall(self, call: Call, times: int) -> float:
        """Seconds that a loop of calls takes, the last one's work included."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def capture(self, calls: Sequence[Call]) -> Call:
        """All calls in a row as one CUDA graph. What the calls read and write must outlive it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in set(calls):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def copy(self) -> tuple[Callable[[], object], int]:
        """A copy that only memory limits, and the bytes that it moves."""
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 2 * _COPY_BYTES

    def matmul(self, dtype: str) -> tuple[Callable[[], object], int]:
        """A product of matrices of random numbers that only arithmetic limits, and its FLOPs."""
        left, right = torch.randn(2, _MATMUL, _MATMUL, device=self.device).to(DTYPES[dtype])
        product = torch.empty_like(left)
        return lambda: torch.matmul(left, right, out=product), 2 * _MATMUL**3
