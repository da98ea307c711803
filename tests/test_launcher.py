"""The host side of generated modules: what a launcher refuses, before anything is launched, and what it never needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.spec import Case, Spec
from dsl.verify.cases import PLAIN, Adversity
from dsl.verify.inputs import Inputs, make_inputs
from dsl.verify.oracle import oracle
from tests.conftest import ROOT, run_python

LENGTHS = (0, 5, 16, 300)


@functools.cache
def golden(stem: str) -> ModuleType:
    return load(ROOT / "generated" / f"{stem}.py")


@functools.cache
def golden_spec(stem: str, name: str) -> Spec:
    file = load_spec(read_source(ROOT / "specs" / f"{stem}.attn"))
    return next(spec for spec in file.attentions if spec.name == name)


def decode_inputs(spec: Spec, lengths: tuple[int, ...] = LENGTHS, adversity: Adversity = PLAIN) -> Inputs:
    return make_inputs(spec, Case((1,) * len(lengths), lengths), adversity=adversity)


def prefill_inputs(spec: Spec, adversity: Adversity = PLAIN) -> Inputs:
    return make_inputs(spec, Case((7, 0, 20), (5, 9, 33)), adversity=adversity)


def assert_right(spec: Spec, inputs: Inputs, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = result if spec.lse else (result, None)
    wanted_out, wanted_lse = oracle(spec, inputs)
    torch.testing.assert_close(out.double(), wanted_out, atol=0.02, rtol=0.02)
    if lse is not None:
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-4)


# Refusals: no kernel runs, so it is enough to pretend that CPU tensors can be launched on.


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(golden("decode"), "_INTERPRETED", True)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.is_repaired", True, raising=False)
    return golden("decode")


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(golden("prefill"), "_INTERPRETED", True)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.is_repaired", True, raising=False)
    return golden("prefill")


def decode_arguments(**replaced: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two sequences of 20 and 32 keys for bf16_4_1, some arguments replaced."""
    return {**decode_inputs(golden_spec("decode", "bf16_4_1"), (20, 32)).arguments, **replaced}


def prefill_arguments(**replaced: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**prefill_inputs(golden_spec("prefill", "bf16_4_72")).arguments, **replaced}


DECODE_REFUSALS = {
    "dtype": ("query", lambda t: t.half(), TypeError, "query is torch.float16, not torch.bfloat16"),
    "cache dtype": ("v_cache", lambda t: t.half(), TypeError, "v_cache is torch.float16, not torch.bfloat16"),
    "index dtype": ("seq_lens", lambda t: t.float(), TypeError, "seq_lens is torch.float32, not torch.int32 or"),
    "device": ("k_cache", lambda t: t.to("meta"), ValueError, "k_cache is on meta, the query on cpu"),
    "table device": ("block_tables", lambda t: t.to("meta"), ValueError, "block_tables is on meta"),
    "rank": (
        "query",
        lambda t: t[0],
        ValueError,
        r"query has shape \(4, 128\), not \[seq, head, dim\] = \(any, 4, 128\)",
    ),
    "heads": ("query", lambda t: t[:, :3], ValueError, r"query has shape \(2, 3, 128\), not .* = \(any, 4, 128\)"),
    "page size": (
        "k_cache",
        lambda t: t[:, :, :, :8],
        ValueError,
        r"k_cache has shape \(7, 1, 16, 8, 8\), not .*slot.* = \(any, 1, 16, 16, 8\)",
    ),
    "layout": ("v_cache", lambda t: t.transpose(2, 3).contiguous(), ValueError, r"v_cache has shape \(7, 1, 16, 128\)"),
    "sequences": ("seq_lens", lambda t: t[:1], ValueError, r"seq_lens has shape \(1,\), not \[seq\] = \(2\)"),
    "table rows": (
        "block_tables",
        lambda t: t[:1],
        ValueError,
        r"block_tables has shape \(1, 2\), not .* = \(2, any\)",
    ),
    "strides": (
        "v_cache",
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        ValueError,
        "last axis of v_cache has stride 128, not 1",
    ),
    "gradient": ("query", lambda t: t.requires_grad_(), ValueError, "query requires grad"),
    "no tensor": ("seq_lens", lambda t: t.tolist(), TypeError, "seq_lens"),
    "nothing": ("query", lambda t: None, TypeError, "query"),
}


@pytest.mark.parametrize("case", DECODE_REFUSALS)
def test_decode_refuses_by_name(decode: ModuleType, case: str) -> None:
    name, change, error, message = DECODE_REFUSALS[case]
    arguments = decode_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"bf16_4_1: .*{message}"):
        decode.bf16_4_1(**arguments)


PREFILL_REFUSALS = {
    "dtype": ("k", lambda t: t.float(), TypeError, "k is torch.float32, not torch.bfloat16"),
    "head_dim": ("q", lambda t: t[:, :, :64], ValueError, r"q has shape \(27, 4, 64\), not .* = \(any, 4, 72\)"),
    "tokens": ("v", lambda t: t[1:], ValueError, "k has 47 tokens, v has 46"),
    "bounds": ("cu_seqlens_k", lambda t: t[1:], ValueError, r"cu_seqlens_k has shape \(3,\), not \[seq \+ 1\] = \(4\)"),
    "no bounds": ("cu_seqlens_q", lambda t: t[:0], ValueError, r"cu_seqlens_(k|q)"),
    "strides": (
        "q",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        ValueError,
        "last axis of q has stride 4",
    ),
}


@pytest.mark.parametrize("case", PREFILL_REFUSALS)
def test_prefill_refuses_by_name(prefill: ModuleType, case: str) -> None:
    name, change, error, message = PREFILL_REFUSALS[case]
    arguments = prefill_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"bf16_4_72: .*{message}"):
        prefill.bf16_4_72(**arguments)


OUT_REFUSALS = {
    "shape": (
        torch.empty(2, 4, 64, dtype=torch.bfloat16),
        ValueError,
        r"out has shape \(2, 4, 64\), not .*\(2, 4, 128\)",
    ),
    "dtype": (torch.empty(2, 4, 128), TypeError, "out is torch.float32, not torch.bfloat16"),
    "device": (torch.empty(2, 4, 128, dtype=torch.bfloat16, device="meta"), ValueError, "out is on meta"),
    "expanded": (torch.empty(1, 4, 128, dtype=torch.bfloat16).expand(2, 4, 128), ValueError, "out .*share memory"),
    "overlap": (
        torch.empty(4096, dtype=torch.bfloat16).as_strided((2, 4, 128), (128, 64, 1)),
        ValueError,
        "out .*share memory",
    ),
    "last axis": (torch.empty(2, 128, 4, dtype=torch.bfloat16).transpose(1, 2), ValueError, "last axis of out"),
}


@pytest.mark.parametrize("case", OUT_REFUSALS)
def test_out_is_refused_by_name(decode: ModuleType, case: str) -> None:
    out, error, message = OUT_REFUSALS[case]
    with pytest.raises(error, match=f"bf16_4_1: .*{message}"):
        decode.bf16_4_1(**decode_arguments(), out=out)


def test_a_table_that_holds_too_many_keys(decode: ModuleType) -> None:
    table = torch.empty(2, 2**27, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_tables holds 2147483648 keys"):
        decode.bf16_4_1(**decode_arguments(block_tables=table))


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CHECKED = {
    "length": ({"seq_lens": index(20, 33)}, r"seq_lens\[1\] is 33, block_tables\[1\] holds 32 keys"),
    "negative length": ({"seq_lens": index(-1, 32)}, r"seq_lens\[0\] is -1"),
    "negative page": (
        {"block_tables": index(1, -1, 2, 3).view(2, 2)},
        r"block_tables\[0\] has page -1, the cache has 7",
    ),
    "page": ({"block_tables": index(1, 2, 3, 7).view(2, 2)}, r"block_tables\[1\] has page 7, the cache has 7"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_check_refuses_values_of_decode(decode: ModuleType, case: str) -> None:
    replaced, message = CHECKED[case]
    with pytest.raises(ValueError, match=f"bf16_4_1: {message}"):
        decode.bf16_4_1(**decode_arguments(**replaced), check=True)


CHECKED_BOUNDS = {
    "decreasing": ({"cu_seqlens_q": index(0, 7, 5, 27)}, r"cu_seqlens_q\[2\] is 5, not from 7 to 27"),
    "beyond": ({"cu_seqlens_k": index(0, 5, 14, 48)}, r"cu_seqlens_k\[3\] is 48, not from 14 to 47"),
    "negative": ({"cu_seqlens_q": index(-1, 7, 7, 27)}, r"cu_seqlens_q\[0\] is -1"),
}


@pytest.mark.parametrize("case", CHECKED_BOUNDS)
def test_check_refuses_values_of_prefill(prefill: ModuleType, case: str) -> None:
    replaced, message = CHECKED_BOUNDS[case]
    with pytest.raises(ValueError, match=f"bf16_4_72: {message}"):
        prefill.bf16_4_72(**prefill_arguments(**replaced), check=True)


# Dispatches.


def test_a_dispatch_chooses_its_block() -> None:
    for name in ("bf16_16_16", "bf16_16_2_256", "bf16_4_1", "fp16_32_8"):
        inputs = decode_inputs(golden_spec("decode", name), (3, 20))
        assert golden("decode")._choose_paged_attention_decode(*inputs.positional).name == name
    for name in ("bf16_16_72", "bf16_32_128"):
        inputs = prefill_inputs(golden_spec("prefill", name))
        assert golden("prefill")._choose_attention_forward(*inputs.positional).name == name


@pytest.mark.parametrize("change", [lambda t: t.half(), lambda t: t[:, :3]], ids=["dtype", "heads"])
def test_a_dispatch_names_its_blocks(decode: ModuleType, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    arguments = decode_arguments()
    with pytest.raises(ValueError, match=r"paged_attention_decode: no block takes .*bf16_16_2_256 .*fp16_64_8"):
        decode.paged_attention_decode(**{**arguments, "query": change(arguments["query"])})


@pytest.mark.parametrize("name", ["query", "k_cache", "v_cache"])
def test_a_dispatch_refuses_a_wrong_rank(decode: ModuleType, name: str) -> None:
    arguments = decode_arguments()
    with pytest.raises(ValueError, match="paged_attention_decode: "):
        decode.paged_attention_decode(**{**arguments, name: arguments[name][0]})


# What is launched.


class Recorder:
    """Stands in for a kernel: remembers each launch's grid and keywords."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.launches.append((grid, keywords))


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, record: str) -> Recorder:
    recorder = Recorder()
    block = getattr(module, record)
    monkeypatch.setattr(module, record, block._replace(kernel=recorder, merge=recorder))
    return recorder


def test_nothing_is_launched_for_nothing(
    decode: ModuleType, prefill: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_recorder = recorded(monkeypatch, decode, "_bf16_4_1_block")
    per_sequence = ("query", "block_tables", "seq_lens")
    empty = {name: tensor[:0] if name in per_sequence else tensor for name, tensor in decode_arguments().items()}
    assert decode.bf16_4_1(**empty).shape == (0, 4, 128)
    prefill_recorder = recorded(monkeypatch, prefill, "_bf16_4_72_block")
    assert prefill.bf16_4_72(**prefill_arguments(q=torch.empty(0, 4, 72, dtype=torch.bfloat16))).shape == (0, 4, 72)
    assert decode_recorder.launches == prefill_recorder.launches == []


def test_launches_depend_on_shapes_alone(decode: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch, decode, "_bf16_4_1_block")
    arguments = {**decode_arguments(), "block_tables": torch.zeros(2, 200, dtype=torch.int32)}
    for lengths in (index(0, 0), index(5, 3200), index(3200, 3200)):
        decode.bf16_4_1(**{**arguments, "seq_lens": lengths})
    assert len(recorder.launches) == 6, "a split and a merge for each call"
    assert recorder.launches[:2] == recorder.launches[2:4] == recorder.launches[4:]


def test_one_tensor_that_is_unaligned_makes_narrow_loads(decode: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch, decode, "_bf16_4_1_block")
    arguments = decode_arguments()
    decode.bf16_4_1(**arguments)
    for name in ("query", "k_cache", "v_cache"):
        tensor = arguments[name]
        shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        spread = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)[..., :-1]
        decode.bf16_4_1(**{**arguments, name: shifted})
        decode.bf16_4_1(**{**arguments, name: spread})
    decode.bf16_4_1(**arguments, out=torch.empty(2, 4, 129, dtype=torch.bfloat16)[..., 1:])
    assert [keywords["ALIGNMENT"] for _, keywords in recorder.launches if "ALIGNMENT" in keywords] == [8, *[1] * 7]


# Without a GPU.


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_cpu_tensors_are_refused_with_advice() -> None:
    advice = r"does not run on cpu tensors; .*\.reference\(\), which runs anywhere"
    for call in (golden("decode").bf16_4_1, golden("decode").paged_attention_decode, golden("decode").bf16_4_1.warmup):
        with pytest.raises(RuntimeError, match=advice):
            call(*decode_arguments().values())
    with pytest.raises(RuntimeError, match=advice):
        golden("prefill").bf16_4_72(**prefill_arguments())


@pytest.mark.parametrize("stem", ["decode", "prefill"])
def test_the_import_needs_no_gpu(stem: str) -> None:
    code = f"import torch, generated.{stem}; assert not torch.cuda.is_initialized()"
    done = run_python("-W", "error", "-c", code, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", ["bf16_4_1", "bf16_16_2_256", "fp16_40_8"])
def test_the_reference_of_decode_is_right(name: str) -> None:
    spec = golden_spec("decode", name)
    for adversity in (PLAIN, Adversity(poison=True, views="odd")):
        inputs = decode_inputs(spec, adversity=adversity)
        assert_right(spec, inputs, getattr(golden("decode"), name).reference(*inputs.positional))


@pytest.mark.parametrize("name", ["bf16_4_72", "bf16_8_128"])
def test_the_reference_of_prefill_is_right(name: str) -> None:
    spec = golden_spec("prefill", name)
    for adversity in (PLAIN, Adversity(poison=True, views="odd")):
        inputs = prefill_inputs(spec, adversity)
        assert_right(spec, inputs, getattr(golden("prefill"), name).reference(*inputs.positional))


def module_of(tmp_path: Path, body: str) -> ModuleType:
    spec = tmp_path / "layer.attn"
    spec.write_text(f"attention attend {{ {body} }}")
    return load(build(spec, tmp_path))


def test_a_grid_that_no_gpu_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = "query = single kv = paged(block = 16) dtype = fp32 heads = 1 head_dim = 16 split = fixed(64)"
    module = module_of(tmp_path, paged)
    monkeypatch.setattr(module, "_INTERPRETED", True)
    row, cache = torch.zeros(1, 1, 16), torch.zeros(1, 16, 1, 16)
    with pytest.raises(ValueError, match="attend: 75000 splits, at most 65535"):
        module.attend(row, cache, cache, torch.zeros(1, 300000, dtype=torch.int32), index(5))


def test_references_give_zeros_where_all_scores_are_minus_infinity(tmp_path: Path) -> None:
    fields = "dtype = fp32 heads = 1 head_dim = 16"
    module = module_of(tmp_path, f"query = packed kv = packed {fields} lse = true")
    keys = torch.full((4, 1, 16), float("-inf"))
    out, lse = module.attend.reference(torch.ones(2, 1, 16), keys, torch.ones(4, 1, 16), index(0, 2), index(0, 4))
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


def test_the_warm_up_compiles_all_variants_whatever_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    module = golden("decode")
    monkeypatch.setattr(module, "_INTERPRETED", True)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.is_repaired", True, raising=False)
    arguments = decode_arguments()
    wide = torch.empty(arguments["query"].numel() + 1, dtype=torch.bfloat16)
    arguments["query"] = wide[1:].view(arguments["query"].shape)
    seen: list[tuple] = []
    monkeypatch.setattr(module, "_enqueue_decode", lambda *given: seen.append(given[-2:]))
    module.bf16_4_1.warmup(**arguments)
    assert {unit for unit, _ in seen} == {8, 1} and len(set(seen)) == 4
