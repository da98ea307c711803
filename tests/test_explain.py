"""Costs are those of the tensors, splits and grids those of the launcher, and the plan is told in words."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsl.check import load_spec
from dsl.explain import explain
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.plan import ModulePlan, plan_module
from dsl.plan.cost import (
    auto_splits,
    case_title,
    cost,
    decode_programs,
    num_splits,
    paged_config,
    prefill_programs,
    table_width,
)
from dsl.source import Source
from dsl.spec import Case, SpecFile
from dsl.verify.inputs import make_inputs
from tests.conftest import DECODE, ROOT, SPECS, run_attnspec, run_python

FAMILIES = {
    "decode": "query = single  kv = paged(block = 16)",
    "prefill": "query = packed  kv = packed",
    "paged": "query = packed  kv = paged(block = 16)",
}
SPLITS = ("auto", "none", "fixed(128)")


def file_of(text: str) -> SpecFile:
    return load_spec(Source.from_text(text, "attend.attn"))


def attention(fields: str) -> str:
    return f"attention attend {{ dtype = bf16  heads = 8 / 2  head_dim = 72 / 40  {fields} }}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", ["", "lse = true"])
def test_bytes_are_those_of_the_tensors(family: str, extra: str):
    spec = file_of(attention(f"{FAMILIES[family]}  {extra}")).attentions[0]
    queries = (1, 1, 1) if family == "decode" else (3, 5, 2)
    inputs = make_inputs(spec, Case(queries, (64, 64, 64)))
    tensors = dict(inputs)
    size = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("_cache"))
    for name in ("k_cache", "v_cache"):
        if name in tensors:
            pages = tensors[name].size(0)
            size += tensors[name].nbytes * (pages - 3) // pages  # three pages belong to no sequence
    rows = sum(queries) * spec.heads
    size += rows * spec.head_dim_v * 2 + (rows * 4 if spec.lse else 0)
    assert cost(spec, Case(queries, (64, 64, 64))).bytes == size


def test_values_that_lie_in_the_keys_are_read_once():
    fields = "query = single  kv = paged(block = 16)  dtype = bf16  heads = 8 / 1  head_dim = 576 / 512"
    apart = file_of(f"attention a {{ {fields} }}").attentions[0]
    shared = file_of(f"attention a {{ {fields}  v_cache = k_cache }}").attentions[0]
    case = Case((1,), (100,))
    assert cost(apart, case).bytes - cost(shared, case).bytes == 100 * 512 * 2
    assert cost(apart, case).flops == cost(shared, case).flops == 2 * 8 * (576 + 512) * 100


def test_flops_take_the_true_head_dimensions():
    spec = file_of(attention(FAMILIES["prefill"])).attentions[0]
    needs = cost(spec, Case((3, 5, 0), (7, 2, 9)))
    assert needs.flops == 2 * 8 * (72 + 40) * (3 * 7 + 5 * 2)
    assert needs.intensity == needs.flops / needs.bytes


def test_cases_have_short_titles():
    decode, prefill = (file_of(attention(FAMILIES[family])).attentions[0] for family in ("decode", "prefill"))
    assert case_title(decode, Case((1, 1), (5, 9))) == "2 seqs, kv_len 5..9"
    assert case_title(prefill, Case((720,), (720,))) == "1 seq, q_len 720"
    assert case_title(prefill, Case((1, 1), (7, 7))) == "2 seqs, q_len 1, kv_len 7"


def built(file: SpecFile, folder: Path) -> tuple[ModulePlan, ModuleType]:
    path = folder / Path(file.source.name).name
    path.write_bytes(file.source.data)
    return plan_module(file), load(build(path, folder))


def sources() -> list[SpecFile]:
    fixed = [DECODE.replace("}", f"    split = {split}\n}}") for split in SPLITS]
    return [load_spec(read_source(spec)) for spec in SPECS] + [file_of(text) for text in fixed]


@pytest.mark.parametrize("file", sources(), ids=lambda file: Path(file.source.name).stem)
def test_splits_and_grids_are_those_of_the_launcher(file: SpecFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module runs up to the launch, on a GPU of `processors` processors that it takes the CPU for."""
    plan, module = built(file, tmp_path)
    monkeypatch.setattr(module, "_INTERPRETED", True)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.is_repaired", True, raising=False)
    for block, (seqs, keys), processors in product(plan.blocks, [(1, 5000), (3, 40)], (1, 16, 132)):
        monkeypatch.setattr(module, "_architecture", lambda device, count=processors: ("sm90", count))
        config = block.config("sm90")
        assert config is not None
        grid = launched(module, block.launch.name, block.spec.name, plan.file, Case((17,) * seqs, (keys,) * seqs))
        if block.spec.family == "decode":
            width = -(-keys // block.spec.block) if block.spec.block else 0
            assert table_width(block.spec, Case((1,), (keys,))) == width
            splits = num_splits(block, config.entries, seqs, width, processors)
            assert grid == (decode_programs(block, seqs), splits)
        elif block.spec.family == "paged":
            chosen = paged_config(block, config, 17 * seqs, seqs)
            rows = 17 * seqs * block.spec.group
            assert grid == (prefill_programs(chosen.entries, rows, seqs), block.spec.kv_heads)
        else:
            assert grid == (prefill_programs(config.entries, 17 * seqs, seqs), block.spec.heads)


def launched(module: ModuleType, launch: str, name: str, file: SpecFile, case: Case) -> tuple[int, ...]:
    """The grid of the kernel that a call launches."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    record = f"_{name}_block"
    block = getattr(module, record)
    setattr(module, record, block._replace(kernel=Kernel(), merge=Kernel()))
    try:
        spec = file.attention(name)
        inputs = make_inputs(spec, case, generator=torch.Generator().manual_seed(0))
        getattr(module, name)(*inputs.positional)
    finally:
        setattr(module, record, block)
    return grids[0]


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"),
    [(1, 1000, 64), (1, 8, 8), (132, 1000, 8), (132, 8, 2), (9999, 1000, 1), (0, 0, 1)],
)
def test_auto_splits(programs: int, tiles: int, expected: int):
    rule = {"programs_per_processor": 8, "tiles_per_split": 4, "maximum_splits": 64}
    assert auto_splits(programs, tiles, 132, **rule) == expected


@pytest.mark.parametrize("spec", [*SPECS, *(ROOT / "tests" / "specs").glob("*.attn")], ids=lambda spec: spec.stem)
def test_every_block_and_case_is_explained(spec: Path):
    file = load_spec(read_source(spec))
    text = explain(file)
    sections = {section.partition(" ")[0]: section for section in text.split("\n\n")[1:]}
    assert list(sections) == [block.name for block in file.attentions]
    for workload in file.workloads:
        assert sections[workload.block].count("FLOP/B") == len(workload.cases)
    assert max(map(len, text.splitlines())) <= 110
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_head_dimensions_layouts_and_sharing_are_told():
    prefill = explain(load_spec(read_source(ROOT / "specs" / "prefill.attn")))
    assert "72 = 64 + 16, of which 8 live" in prefill
    assert "(shared with 1 more block)" in prefill
    decode = " ".join(explain(load_spec(read_source(ROOT / "specs" / "decode.attn"))).split())
    assert "contiguous along dim%8: runs of 8 elements, one load of 16 bytes" in decode
    assert "contiguous along slot: chunks of up to 16 slots, 2 loads of 16 bytes" in decode


def test_what_does_not_fit_is_told_with_the_bytes():
    text = DECODE.replace("dtype    = bf16", "dtype    = fp32").replace("head_dim = 64", "head_dim = 576")
    plan = plan_module(file_of(text))
    (block,) = plan.blocks
    assert block.unfit
    told = " ".join(explain(plan.file).split())
    for name, needed in block.unfit.items():
        assert f"{name}: needs {needed:,} bytes of shared memory" in told


def test_explaining_imports_no_torch(tmp_path: Path):
    program = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from dsl.cli import main; main()"
    run = run_python("-c", program, "explain", SPECS[0])
    assert run.returncode == 0, run.stderr.decode()


def test_the_command_line():
    run = run_attnspec("explain", SPECS[0])
    assert run.returncode == 0
    assert run.stdout.decode() == explain(load_spec(read_source(SPECS[0])))
    assert run_attnspec("explain", "attn203").stdout.startswith(b"ATTN203: ")
