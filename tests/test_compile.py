"""Compiling without a GPU, by whichever Triton comes first on the path."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from dsl.architecture import architecture
from dsl.check import load_spec
from dsl.compile import CompileError, compile_function, compile_module
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.plan import plan_module
from dsl.plan.shaping import has_expressions
from tests.conftest import MODELS, ROOT, SPECS

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

CHIPS = ("sm80", "sm90", "sm100", "gfx942", "gfx950")
WORKLOADS = ("decode", "prefill", "chunked")
NEWEST = not version("triton").startswith("3.6.")
GOLDENS = [(stem, chip) for stem in WORKLOADS for chip in CHIPS]
GOLDENS += [(spec.stem, chip) for spec in SPECS for chip in ("sm90", "gfx942") if NEWEST and spec.stem not in WORKLOADS]
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def row_norms(rows, norms, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    tile = tl.load(rows + row[:, None] * stride + tl.arange(0, COLUMNS)[None, :])
    products = tl.dot(tile, tile.T)
    tl.store(norms + row, tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1))


def no_kernel(rows):
    pass
"""
TYPES = {"rows": "*bf16", "norms": "*fp32", "stride": "i32"}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("kernels") / "norms.py"
    path.write_text(KERNEL)
    return load(path)


def compile_norms(module, chip: str, rows: int = 64, num_warps: int = 4):
    constants = {"ROWS": rows, "COLUMNS": 64}
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return compile_function(module.row_norms, TYPES, constants, ("rows", "norms"), architecture(chip), options)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_on_a_chip(module, chip: str):
    compiled = compile_norms(module, chip)
    assert 16 <= compiled.registers <= 512
    assert compiled.spill_bytes == 0
    assert 0 < compiled.shared_bytes <= architecture(chip).shared_bytes
    assert (".amdgcn_target" if chip.startswith("gfx") else ".version") in compiled.code
    assert (f"{chip}" if chip.startswith("gfx") else f".target sm_{chip[2:]}") in compiled.code


@pytest.mark.parametrize("chip", ["sm90", "gfx1100"])
def test_spills_are_seen(module, chip: str):
    assert compile_norms(module, chip, rows=128, num_warps=1).spill_bytes > 0


def test_refusals_say_what_is_missing(module):
    chip = architecture("sm90")
    with pytest.raises(CompileError, match="neither type nor value is known for COLUMNS"):
        compile_function(module.row_norms, TYPES, {"ROWS": 64}, (), chip, {})
    with pytest.raises(CompileError, match="CompilationError"):
        compile_function(module.row_norms, TYPES, {"ROWS": 63, "COLUMNS": 64}, (), chip, {"enable_fp_fusion": True})
    with pytest.raises(CompileError, match="no kernel"):
        compile_function(module.no_kernel, {}, {}, (), chip, {})


def compiled_golden(stem: str, chip: str, all_variants: bool):
    plan = plan_module(load_spec(read_source(ROOT / "specs" / f"{stem}.attn")))
    return compile_module(plan, ROOT / "generated" / f"{stem}.py", architecture(chip), all_variants=all_variants)


@pytest.mark.parametrize(("stem", "chip"), GOLDENS)
def test_goldens_compile_within_their_plan(stem: str, chip: str):
    kernels = compiled_golden(stem, chip, all_variants=False)
    assert kernels
    for kernel in kernels:
        assert kernel.fits and kernel.within_plan, (kernel.launch.kernel.name, kernel.launch.variant, kernel.compiled)


FAST = ("sm90", "gfx942")
MODEL_CHIPS = [
    pytest.param(model, chip, marks=() if chip in FAST else pytest.mark.slow) for model in MODELS for chip in CHIPS
]


@pytest.mark.skipif(not NEWEST, reason="models are compiled under the newest version")
@pytest.mark.parametrize(("model", "chip"), MODEL_CHIPS, ids=lambda value: getattr(value, "stem", value))
def test_models_compile_within_their_plan_and_spill_nothing(model: Path, chip: str):
    """Dimensions up to 128; a kernel without expressions keeps the tiles that were measured for it."""
    plan = plan_module(load_spec(read_source(model)))
    specs = {block.spec.name: block.spec for block in plan.blocks}
    for kernel in compile_module(plan, ROOT / "generated" / "models" / f"{model.stem}.py", architecture(chip)):
        assert kernel.fits and kernel.within_plan, (kernel.launch.kernel.name, kernel.launch.variant, kernel.compiled)
        spec = specs[kernel.launch.variant.split()[0]]
        if spec.head_dim_qk <= 128 and has_expressions(spec):
            assert kernel.compiled.spill_bytes == 0, (kernel.launch.variant, kernel.compiled)


EXPRESSIONS = """
attention packed {
    query = packed  kv = packed  dtype = bf16  heads = 6 / 2  head_dim = 64  lse = true
    param slopes[head] : fp16  param bias[head, 40] : bf16  param power : fp32  param on : bool  param n : int64
    param doc[q_token] : int64  param keep[kv_token] : bool
    mask  = (doc[q_token] == doc[kv_token] or kv // 3 == q // n) and not (keep[kv_token] and q % 5 == 2)
    score = where(on and kv % 2 == 0, softcap(score, 5) + slopes[h] * (kv - q) + bias[h, q - kv + 20],
                  min(score, power, 3) * max(1, tanh(score)) - abs(score) / n)
        + exp(-abs(score)) + log(1 + score * score) + sqrt(abs(score)) + alibi(h)
    sink  = slopes[h] * 2
}
attention paged from packed { query = single  kv = paged(block = 16) }
attention two_ranges from packed { mask = causal and (q - kv < 64 or kv < n) }
"""


@pytest.mark.parametrize("chip", FAST)
def test_every_function_compiles(tmp_path: Path, chip: str):
    spec = tmp_path / "expressions.attn"
    spec.write_text(EXPRESSIONS)
    plan = plan_module(load_spec(read_source(spec)))
    kernels = compile_module(plan, build(spec, tmp_path), architecture(chip))
    assert {kernel.launch.kernel.name for kernel in kernels} >= {
        "_prefill_kernel",
        "_prefill_kernel_2",
        "_decode_kernel",
    }
    for kernel in kernels:
        assert kernel.fits and kernel.within_plan, (kernel.launch.kernel.name, kernel.launch.variant, kernel.compiled)


def test_masked_keys_and_values_are_read_in_16_bytes():
    """In both families; a test by token on the contiguous axis of values would make every load one of 2 bytes."""
    plan = plan_module(load_spec(read_source(ROOT / "specs" / "models" / "mistral.attn")))
    path = ROOT / "generated" / "models" / "mistral.py"
    for chip in ("sm90", "gfx942"):
        for kernel in compile_module(plan, path, architecture(chip)):
            narrow = r"global_load_ushort" if chip == "gfx942" else r"ld\.global\S*\.b16"
            assert not re.search(narrow, kernel.compiled.code), (kernel.launch.variant, chip)


@pytest.mark.parametrize("chip", ["sm90", "gfx942"])
def test_masks_over_slots_read_16_bytes(tmp_path: Path, chip: str):
    spec = tmp_path / "slots.attn"
    fields = "query = single kv = paged(block = 16) dtype = bf16 heads = 8 / 2 head_dim = 128 mask = q - kv < 1000"
    layouts = "k_cache = [block, kv_head, dim/8, slot, dim%8] v_cache = [block, kv_head, dim, slot]"
    spec.write_text(f"attention slots {{ {fields} {layouts} }}")
    plan = plan_module(load_spec(read_source(spec)))
    kernel = compile_module(plan, build(spec, tmp_path), architecture(chip))[0]
    narrow = r"global_load_ushort" if chip == "gfx942" else r"ld\.global\S*\.b16"
    assert kernel.compiled.spill_bytes == 0 and not re.search(narrow, kernel.compiled.code)


@pytest.mark.parametrize("chip", CHIPS)
def test_decode_spills_nothing(chip: str):
    for kernel in compiled_golden("decode", chip, all_variants=False):
        # Triton 3.6 takes 168 registers for one ring of one stage, where twelve programs fit, and keeps four words. At
        # head_dim 256 a ring's warp has all registers that there are, and keeps two.
        numbers = kernel.launch.constants
        most = 16 if numbers.get("STAGES") == 1 else 8 if "STAGES" in numbers and numbers["HEAD_DIM_V"] == 256 else 0
        assert kernel.compiled.spill_bytes <= most, (kernel.launch.variant, kernel.compiled)


CHUNKED = """
attention base { query = packed  kv = paged(block = 16)  dtype = bf16  heads = 32 / 8  head_dim = 128  mask = causal }
attention rows_64 from base { head_dim = 64 }
attention rows_96 from base { head_dim = 96 }
attention x_split_64 from rows_64 {
    lse = true  k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, dim, slot]
}
attention x_split_128 from x_split_64 { head_dim = 128 }
attention shuffled_128 from x_split_128 { v_cache = [block, kv_head, slot/8, dim, slot%8] }
attention expressions_128 from base {
    param sinks[head] : fp32  mask = causal and q - kv < 128  score = softcap(score, 30)  sink = sinks[h]
}
"""


@pytest.mark.skipif(not NEWEST, reason="layouts are compiled under the newest version")
@pytest.mark.parametrize("chip", [pytest.param(chip, marks=() if chip in FAST else pytest.mark.slow) for chip in CHIPS])
def test_packed_queries_over_pages_spill_nothing(tmp_path: Path, chip: str):
    """In tiles of both heights, and keys and values are read in 16 bytes."""
    spec = tmp_path / "chunked.attn"
    spec.write_text(CHUNKED)
    plan = plan_module(load_spec(read_source(spec)))
    narrow = r"global_load_ushort" if chip.startswith("gfx") else r"ld\.global\S*\.b16"
    for kernel in compile_module(plan, build(spec, tmp_path), architecture(chip)):
        where = (kernel.launch.variant, kernel.compiled)
        assert kernel.fits and kernel.within_plan and kernel.compiled.spill_bytes == 0, where
        assert not re.search(narrow, kernel.compiled.code), where


@pytest.mark.parametrize("chip", ["sm90", "gfx942"])
def test_keys_and_values_are_read_in_16_bytes(chip: str):
    """As many wide loads as a tile of keys and values needs, and no narrow one of their dtype."""
    wide = "global_load_dwordx4" if chip == "gfx942" else "ld.global.v4"
    narrow = r"global_load_ushort" if chip == "gfx942" else r"ld\.global\S*\.b16"
    for kernel in compiled_golden("decode", chip, all_variants=False):
        if not {"TILE", "HEAD_DIM"} <= kernel.launch.constants.keys():
            continue  # a merge, or TMA copies
        numbers = {**kernel.launch.constants, **kernel.launch.options}
        tile_bytes = numbers["TILE"] * 2 * numbers["HEAD_DIM"] * 2
        needed = tile_bytes // (16 * numbers["num_warps"] * kernel.architecture.warp_size)
        assert kernel.compiled.code.count(wide) >= needed, kernel.launch.variant
        assert not re.search(narrow, kernel.compiled.code), kernel.launch.variant


@pytest.mark.parametrize(("stem", "copy"), [("prefill", "cp.async.cg.shared.global")])
def test_packed_keys_and_values_are_copied_in_16_bytes(stem: str, copy: str):
    for kernel in compiled_golden(stem, "sm90", all_variants=False):
        if "SPLITS" in kernel.launch.constants:
            assert "ld.global.v4.b32" in kernel.compiled.code, kernel.launch.variant
            continue
        if "CONSUMERS" in kernel.launch.constants:
            continue  # TMA copies
        sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", kernel.compiled.code))
        assert sizes == {"0x10"}, (kernel.launch.variant, sizes)


@pytest.mark.slow
def test_unaligned_tensors_use_no_wgmma():
    for kernel in compiled_golden("prefill", "sm90", all_variants=True):
        assert kernel.launch.aligned == ("wgmma.mma_async" in kernel.compiled.code), kernel.launch.variant


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "chip"), [(stem, chip) for stem in WORKLOADS for chip in ("sm90", "gfx942")])
def test_the_slower_variants_compile_too(stem: str, chip: str):
    for kernel in compiled_golden(stem, chip, all_variants=True):
        assert kernel.fits and kernel.within_plan, (kernel.launch.kernel.name, kernel.launch.variant, kernel.compiled)


def test_the_sums_of_many_heads_fit_the_plan(tmp_path: Path):
    spec = tmp_path / "wide.attn"
    fields = "query = single kv = paged(block = 16) dtype = bf16 heads = 64 / 1 head_dim = 64 / 128"
    spec.write_text(f"attention wide {{ {fields} }}")
    plan = plan_module(load_spec(read_source(spec)))
    for kernel in compile_module(plan, build(spec, tmp_path), architecture("sm90")):
        assert kernel.within_plan, kernel
