"""Calls that repeat an earlier one: they launch what Triton would, and skip no check that could fail.

Kernels are compiled, and launched on a CUDA driver that only remembers what it is given.
"""

from __future__ import annotations

import concurrent.futures
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build
from dsl.source import Source
from dsl.spec import Case
from dsl.verify.inputs import make_inputs
from tests.fake_cuda import FakeDriver, Launched, fake_cuda

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="not run: it takes the place of the GPU's driver"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="not run: it needs a C compiler"),
]

TEXT = """
attention ring { query = single  kv = paged(block = 16)  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true }
attention decode from ring { targets = [portable] }
attention whole from decode { split = none  lse = false }
attention whole_fp16 from whole { dtype = fp16 }
dispatch either = [whole, whole_fp16]
attention prefill { query = packed  kv = packed  dtype = bf16  heads = 2  head_dim = 72 }
attention chunked { query = packed  kv = paged(block = 16)  dtype = bf16  heads = 4 / 2  head_dim = 16  mask = causal }
"""
SPECS = {spec.name: spec for spec in load_spec(Source.from_text(TEXT, "attend.attn")).attentions}
CASES = {
    "ring": Case((1, 1), (9000, 40)),
    "decode": Case((1, 1), (900, 40)),
    "whole": Case((1, 1), (20, 32)),
    "prefill": Case((70,), (3000,)),
    "chunked": Case((1, 70), (40, 300)),
}
Arguments = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "attend.attn"
    path.write_text(TEXT)
    return build(path, path.parent)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


class Watched:
    """A module that takes CPU tensors for those of an H200, and counts the launches that Triton makes for it."""

    def __init__(self, module: ModuleType, driver: FakeDriver) -> None:
        self.module, self.driver = module, driver
        self.by_triton = 0
        start = module._start

        def counted(*arguments: Any, **named: Any) -> Any:
            self.by_triton += 1
            return start(*arguments, **named)

        module.__dict__.update(_start=counted, _check_device=lambda *_: None, _architecture=lambda _: ("sm90", 132))

    def __call__(self, name: str, *arguments: Any, **named: Any) -> tuple[list[Launched], int]:
        """What a call launches, and how many of the launches are Triton's."""
        self.driver.take()
        before = self.by_triton
        getattr(self.module, name)(*arguments, **named)
        return self.driver.take(), self.by_triton - before

    def entry(self, name: str) -> Any:
        return getattr(self.module, f"_{name}_entry")

    def forget(self, name: str) -> None:
        self.entry(name).calls.clear()
        self.entry(name).last = None


@pytest.fixture
def watched(built: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", driver.get_current_device, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield Watched(load(built), driver)
    driver.device, driver.stream = -1, 77


def example(name: str, seed: int = 0) -> Arguments:
    """Tensors of a call and its results; another seed gives others of the same kinds."""
    spec = SPECS[name]
    inputs = make_inputs(spec, CASES[name], generator=torch.Generator().manual_seed(seed))
    outs = {"out": torch.empty_like(inputs.positional[0])}
    if spec.lse:
        outs["out_lse"] = torch.empty(4, 2)
    return {**inputs.arguments, **outs}


# The same launches.


@pytest.mark.parametrize(
    ("name", "kernels"), [("ring", 2), ("decode", 2), ("whole", 1), ("prefill", 2), ("chunked", 1)]
)
def test_a_repeated_call_launches_what_triton_would(watched: Watched, name: str, kernels: int) -> None:
    first, second = example(name), example(name, seed=1)
    workspace, other = torch.empty(1 << 20), torch.empty(1 << 20)
    made, by_triton = watched(name, **first, workspace=workspace)
    assert by_triton == kernels == len(made)
    assert watched(name, **first, workspace=workspace) == (made, 0)
    repeated, by_triton = watched(name, **second, workspace=other)
    assert by_triton == 0
    watched.forget(name)
    assert watched(name, **second, workspace=other) == (repeated, kernels)
    assert repeated != made


def test_tensor_maps_are_encoded_once_for_a_place(watched: Watched, driver: FakeDriver) -> None:
    first, second = example("prefill"), example("prefill", seed=1)
    for arguments in (first, second) * 2:
        watched("prefill", **arguments)
    count = driver.encodings
    for arguments in (first, second, {**first, "out": second["out"]}):
        assert watched("prefill", **arguments)[1] == 0
    assert driver.encodings == count


def test_without_workspace_a_stream_keeps_its_scratch(watched: Watched, driver: FakeDriver) -> None:
    arguments = example("decode")
    watched("decode", **arguments)
    split, merge = watched("decode", **arguments)[0]
    assert watched("decode", **arguments)[0] == [split, merge]
    driver.stream = 78
    other, _ = watched("decode", **arguments)[0]
    assert other.stream == 78 and scratch(other) != scratch(split)
    driver.stream = 77
    assert watched("decode", **arguments)[0] == [split, merge]


def scratch(launched: Launched) -> tuple[int, ...]:
    """Where a split kernel of `decode` writes: behind five tensors and two results."""
    return launched.parameters[7:9]


def test_scratch_in_use_is_not_taken(watched: Watched) -> None:
    """Another thread may call on the same stream between two kernels of a call."""
    arguments = example("decode")
    watched("decode", **arguments)
    watched("decode", **arguments)
    entry = watched.entry("decode")
    (call,) = entry.calls.values()
    _, merge = call.launches
    nested: list[Launched] = []

    def interrupted(*given: Any) -> None:
        call.launches[1] = merge
        nested.extend(watched("decode", **arguments)[0])
        merge.start(*given)

    outer = watched("decode", **arguments)[0][0]
    call.launches[1] = merge._replace(start=interrupted)
    watched("decode", **arguments)
    assert scratch(nested[0]) != scratch(outer)


def test_an_operator_keeps_no_scratch(watched: Watched) -> None:
    arguments = example("decode")
    watched("decode", **arguments)
    tensors, results = [*arguments.values()][:5], [*arguments.values()][5:]
    entry, module = watched.entry("decode"), watched.module
    module._call(entry, tuple(tensors), tuple(results), None, False, keeps_scratch=False)
    assert watched.by_triton == 2 and not module._idle_scratch
    module._call(entry, tuple(tensors), tuple(results), None, False)
    assert watched.by_triton == 2 and len(module._idle_scratch) == 1


def test_results_are_made_where_none_are_given(watched: Watched) -> None:
    arguments = example("decode")
    tensors = [*arguments.values()][:5]
    shapes = [[result.shape for result in watched.module.decode(*tensors)] for _ in range(3)]
    assert watched.by_triton == 2
    assert shapes[0] == shapes[1] == shapes[2] == [(2, 4, 16), (4, 2)]
    out, lse = watched.module.decode(*tensors, out=arguments["out"])
    assert out is arguments["out"] and lse.shape == (4, 2)


def test_options_of_a_launch_are_kept(watched: Watched) -> None:
    block = watched.module._decode_block
    watched.module._decode_block = block._replace(merge_constants={**block.merge_constants, "launch_pdl": True})
    arguments = example("decode")
    made, _ = watched("decode", **arguments)
    repeated, by_triton = watched("decode", **arguments)
    assert by_triton == 0
    assert [launched.pdl for launched in made] == [launched.pdl for launched in repeated] == [False, True]


# What makes a call another one.


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the rows further apart."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not aligned to 16 bytes."""
    wide = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    wide[1:] = tensor.flatten()
    return wide[1:].view(tensor.shape)


CHANGES: dict[str, Callable[[Arguments], Arguments]] = {
    "strides": lambda a: {"k_cache": widened(a["k_cache"])},
    "strides of out": lambda a: {"out": widened(a["out"])},
    "alignment": lambda a: {"v_cache": shifted(a["v_cache"])},
    "alignment of out": lambda a: {"out": shifted(a["out"])},
    "index dtype": lambda a: {"seq_lens": a["seq_lens"].long()},
    "table": lambda a: {"block_tables": a["block_tables"][:, :1]},
    "strides of lengths": lambda a: {"seq_lens": torch.stack([a["seq_lens"]] * 2, 1)[:, 0]},
    "pages": lambda a: {"k_cache": a["k_cache"][1:], "v_cache": a["v_cache"][1:]},
    "batch": lambda a: {name: a[name][:1] for name in ("query", "block_tables", "seq_lens", "out")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_of_tensor_is_another_call(watched: Watched, change: str) -> None:
    arguments = example("whole")
    watched("whole", **arguments)
    watched("whole", **arguments)
    watched("whole", **arguments)
    changed = {**arguments, **CHANGES[change](arguments)}
    launched, by_triton = watched("whole", **changed)
    assert by_triton == 1
    assert watched("whole", **changed) == (launched, 0)
    assert watched("whole", **arguments)[1] == 0


def test_inference_mode_changes_nothing(watched: Watched) -> None:
    arguments = example("whole")
    launched, _ = watched("whole", **arguments)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for _ in range(3):
                assert watched("whole", **arguments) == (launched, 0)
            assert watched.entry("whole").last.fits(*arguments.values())


def test_a_dispatch_chooses_anew(watched: Watched) -> None:
    arguments = example("whole")
    other = {name: t.half() if t.is_floating_point() else t for name, t in arguments.items()}
    kernels = {launched.kernel for given in (arguments, other) * 3 for launched in watched("either", **given)[0]}
    assert len(kernels) == 2 and watched.by_triton == 2


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "no guards"])
def test_what_is_refused_is_refused_after_calls_that_are_not(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(watched.module, "_tensor_guards", lambda: None)
    arguments = example("whole")
    for _ in range(3):
        watched("whole", **arguments)
    assert (watched.entry("whole").last is not None) == guarded
    refusals = {
        "query is torch.float16": {"query": arguments["query"].half()},
        "query requires grad": {"query": arguments["query"].clone().requires_grad_()},
        "out requires grad": {"out": arguments["out"].clone().requires_grad_()},
        "k_cache is on meta": {"k_cache": arguments["k_cache"].to("meta")},
        "seq_lens has shape": {"seq_lens": arguments["seq_lens"][:1]},
        "seq_lens is a list": {"seq_lens": [20, 32]},
        "query is a NoneType": {"query": None},
        "query is a str": {"query": "query", "out": None},
        "last axis of v_cache": {"v_cache": arguments["v_cache"].mT.contiguous().mT},
        "out .*share memory": {"out": arguments["out"][:1].expand(2, -1, -1)},
        "workspace is a int": {"workspace": 3},
        "workspace is 8 bytes on meta": {"workspace": torch.empty(2, device="meta")},
    }
    for message, change in refusals.items():
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"whole: .*{message}"):
                watched("whole", **{**arguments, **change})
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 33"):
        watched("whole", **{**arguments, "seq_lens": torch.tensor([33, 32], dtype=torch.int32)}, check=True)
    assert watched("whole", **arguments)[1] == 0


def test_a_tensor_that_wants_gradients_is_checked_each_time(watched: Watched) -> None:
    arguments = example("whole")
    arguments["query"].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert watched("whole", **arguments)[1] == 1
    with pytest.raises(ValueError, match="query requires grad"):
        watched("whole", **arguments)


def test_a_small_workspace_is_refused_after_a_large_one(watched: Watched) -> None:
    arguments = example("decode")
    for _ in range(2):
        watched("decode", **arguments, workspace=torch.empty(1 << 20))
    with pytest.raises(ValueError, match="decode: workspace is 4 bytes"):
        watched("decode", **arguments, workspace=torch.empty(1))


def test_the_same_tensor_twice_is_two_tensors_later(watched: Watched) -> None:
    """Self-attention passes its bounds twice; the next call may pass others."""
    arguments = example("prefill")
    arguments["cu_seqlens_k"] = arguments["cu_seqlens_q"]
    watched("prefill", **arguments)
    assert watched("prefill", **arguments)[1] == 0
    fits = watched.entry("prefill").last.fits
    other = {**arguments, "cu_seqlens_k": arguments["cu_seqlens_q"].clone()}
    assert fits(*arguments.values()) and not fits(*other.values())
    repeated, by_triton = watched("prefill", **other)
    assert by_triton == 0
    parameters = repeated[0].parameters
    assert {other["cu_seqlens_q"].data_ptr(), other["cu_seqlens_k"].data_ptr()} <= {*parameters}


def test_keys_that_are_values_too_are_left_to_triton(watched: Watched) -> None:
    """Which of the two a tensor map reads cannot be told from where it begins."""
    arguments = example("prefill")
    arguments["v"] = arguments["k"]
    for _ in range(2):
        assert watched("prefill", **arguments)[1] == 2


# When Triton launches.


def test_hooks_of_profilers_are_called(watched: Watched) -> None:
    from triton import knobs

    arguments = example("whole")
    watched("whole", **arguments)
    seen: list[Any] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        assert watched("whole", **arguments)[1] == 0
        hook.add(seen.append)
        try:
            assert watched("whole", **arguments)[1] == 1
        finally:
            hook.remove(seen.append)
    assert len(seen) == 2 and watched("whole", **arguments)[1] == 0


def test_hooks_of_a_kernel_are_called(watched: Watched) -> None:
    arguments = example("whole")
    watched("whole", **arguments)
    kernel = watched.module._whole_block.kernel
    seen: list[Any] = []
    kernel.add_pre_run_hook(lambda *given, **named: seen.append(named))
    assert watched("whole", **arguments)[1] == 1 and len(seen) == 1
    kernel.pre_run_hooks.clear()
    assert watched("whole", **arguments)[1] == 0


def test_settings_of_triton_are_heeded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    arguments = example("whole")
    watched("whole", **arguments)
    for settings, name, value in ((knobs.runtime, "launch_enter_hook", None), (knobs.runtime, "debug", True)):
        with monkeypatch.context() as patch:
            patch.setattr(settings, name, value)
            assert watched("whole", **arguments)[1] == 1
        assert watched("whole", **arguments)[1] == 0


def test_a_device_that_is_not_current(watched: Watched, driver: FakeDriver) -> None:
    arguments = example("whole")
    watched("whole", **arguments)
    driver.device = 3
    assert watched("whole", **arguments)[1] == 1
    driver.device = -1
    assert watched("whole", **arguments)[1] == 0


@pytest.mark.parametrize("difference", ["no launch", "no wrapper", "other arguments", "scratch", "hooks"])
def test_another_triton_is_left_to_itself(
    watched: Watched, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    from triton import knobs

    launcher = driver.nvidia.CudaLauncher
    call = launcher.__call__
    if difference == "no wrapper":
        monkeypatch.delattr(driver.nvidia, "wrap_handle_tensordesc")
        monkeypatch.setattr(launcher, "__init__", lambda self, src, metadata: setattr(self, "launch", None))
        monkeypatch.setattr(launcher, "__call__", lambda self, *given: None)
    elif difference == "no launch":
        monkeypatch.setattr(launcher, "__call__", lambda self, *given: None)
    elif difference == "other arguments":
        monkeypatch.setattr(launcher, "__call__", lambda self, *given: call(self, *given[:-1], object()))
    elif difference == "scratch":
        init = launcher.__init__

        def with_scratch(self: Any, src: Any, metadata: Any) -> None:
            init(self, src, metadata)
            self.global_scratch_size, self.global_scratch_align = 64, 16

        import triton

        monkeypatch.setattr(launcher, "__init__", with_scratch)
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    else:
        monkeypatch.setattr(type(knobs.runtime), "launch_enter_hook", None)
    arguments = example("whole")
    for _ in range(2):
        assert watched("whole", **arguments)[1] == 1
    assert not watched.entry("whole").calls


def test_what_triton_passes_on_an_amd_gpu(watched: Watched) -> None:
    """Its C function takes other arguments, the stream among them in another place."""
    amd = pytest.importorskip("triton.backends.amd.driver")
    launcher = amd.HIPLauncher.__new__(amd.HIPLauncher)
    zeros = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    launcher.__dict__.update(dict.fromkeys(zeros, 0), launch_cooperative_grid=False, warp_size=64)
    launcher.__dict__.update(arg_annotations=[], kernel_signature=b"")
    source, metadata = SimpleNamespace(signature={0: "*bf16", 1: "i32"}), SimpleNamespace()
    compiled = SimpleNamespace(run=launcher, function=5, packed_metadata=(4, 1, 0), src=source, metadata=metadata)
    tensor = torch.empty(3)
    before, after, packed, passed = watched.module._pass(compiled, (7,), [tensor, 1000], 2)
    assert before == (False, 7, 1, 1) and after[0] == 5
    assert passed[0] is tensor and passed[1] == 1000 and len(passed) == 2
    assert isinstance(packed, bool)


def test_the_first_calls_of_threads(watched: Watched, driver: FakeDriver) -> None:
    arguments = [example("decode", seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda given: watched.module.decode(**given), arguments * 4))
    assert len(watched.entry("decode").calls) == 1
    launched = driver.take()
    assert len(launched) == 64
    splits = [each for each in launched if len(each.parameters) == len(launched[0].parameters)]
    assert {each.parameters[0] for each in splits} == {given["query"].data_ptr() for given in arguments}


# What is kept.


@pytest.mark.parametrize("name", CASES)
def test_a_call_keeps_no_tensor(watched: Watched, name: str) -> None:
    arguments = example(name)
    for _ in range(3):
        watched(name, **arguments, workspace=torch.empty(1 << 20))
        watched(name, **arguments)
    alive = [weakref.ref(tensor) for tensor in arguments.values()]
    assert watched.entry(name).last is not None
    del arguments
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_only_so_many_calls_are_kept(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched.module, "_MOST_CALLS", 2)
    arguments = example("whole")
    for width in range(1, 6):
        table = torch.zeros(2, width, dtype=torch.int32)
        watched("whole", **{**arguments, "block_tables": table})
        assert len(watched.entry("whole").calls) <= 2
