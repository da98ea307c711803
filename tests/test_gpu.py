"""What only a GPU shows: real kernels beside the oracle, graphs, streams, sizes, compiled variants, repeated bits."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build
from dsl.source import Source
from dsl.spec import Case, Spec
from dsl.verify.cases import PLAIN, Adversity
from dsl.verify.compare import compare, expect
from dsl.verify.inputs import make_inputs
from dsl.verify.runner import verify_files
from dsl.verify.speculation import failing_rows, failing_tiles
from tests.conftest import ROOT, SPECS
from tests.realistic import FAILING_TILES, packed_arguments, queries_and_keys

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TEXT = """
attention decode { query = single  kv = paged(block = 16)  dtype = bf16  heads = 8 / 2  head_dim = 64  lse = true }
attention fixed from decode { split = fixed(128) }
attention whole from decode { split = none }
attention one_head from decode { heads = 1  head_dim = 16  lse = false }
attention prefill { query = packed  kv = packed  dtype = bf16  heads = 4 / 2  head_dim = 72  lse = true }
attention prefill_64 from prefill { head_dim = 64 }
attention prefill_fp16 from prefill { dtype = fp16 }
attention prefill_one_head from prefill { heads = 1  head_dim = 16  lse = false }
"""
SPEC_OF: dict[str, Spec] = {spec.name: spec for spec in load_spec(Source.from_text(TEXT, "attend.attn")).attentions}
DECODES, PREFILLS = ("decode", "fixed", "whole"), ("prefill", "prefill_64")
MANY_SEQS, MANY_PACKED = 65_536, 80_001
REPEATS = 20
MOST_VARIANTS = 8
"""Compiled variants of one kernel text of one block: aligned or not, small pages or large; or each depth of a ring."""
Results = tuple[torch.Tensor, ...]


@pytest.fixture
def fresh(tmp_path: Path) -> ModuleType:
    """A module whose kernels nothing has compiled yet in this process."""
    path = tmp_path / "attend.attn"
    path.write_text(TEXT)
    return load(build(path, tmp_path))


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("gpu") / "attend.attn"
    path.write_text(TEXT)
    return load(build(path, path.parent))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def decode_batch(lengths: list[int], width: int, heads: int = 8, kv_heads: int = 2, dim: int = 64, seed: int = 0):
    """Arguments by name: lengths over tables of `width` pages, every one of them a page of the cache."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    cache = torch.randn(2, 300, 16, kv_heads, dim, generator=generator, device=DEVICE).bfloat16()
    shape = (len(lengths), width)
    return {
        "query": torch.randn(len(lengths), heads, dim, generator=generator, device=DEVICE).bfloat16(),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "block_tables": torch.randint(300, shape, generator=generator, device=DEVICE, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
    }


def prefill_batch(lengths: list[int], name: str = "prefill", adversity: Adversity = PLAIN) -> dict[str, torch.Tensor]:
    return dict(make_inputs(SPEC_OF[name], Case(tuple(lengths), tuple(lengths)), DEVICE, adversity=adversity))


def batch(name: str, *lengths: int) -> dict[str, torch.Tensor]:
    """A batch that a kernel would split where it can."""
    return decode_batch(list(lengths), 200) if name in DECODES else prefill_batch(list(lengths), name)


def results(result: torch.Tensor | Results) -> Results:
    return result if isinstance(result, tuple) else (result,)


def assert_right(name: str, arguments: dict[str, torch.Tensor], result: torch.Tensor | Results) -> None:
    spec = SPEC_OF[name]
    out, lse = result if spec.lse else (result, None)
    found = compare(spec, expect(spec, arguments), out, lse)  # type: ignore[arg-type]
    assert found.problem is None, found.problem


def assert_equal(left: torch.Tensor | Results, right: torch.Tensor | Results) -> None:
    for one, other in zip(results(left), results(right), strict=True):
        assert torch.equal(one, other)


# Every spec, at the size of its workloads.


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_goldens_verify(spec: Path) -> None:
    report = verify_files([spec], device=DEVICE, output_dir=ROOT / "generated")
    assert report.passed, report.failures


@pytest.mark.parametrize("spec", sorted((ROOT / "tests" / "specs").glob("*.attn")), ids=lambda spec: spec.stem)
def test_layouts_and_dimensions_verify(spec: Path) -> None:
    report = verify_files([spec], device=DEVICE)
    assert report.passed, report.failures


# Graphs and streams.


@pytest.mark.parametrize("name", ["decode", "fixed", "whole"])
def test_a_graph_of_decode(fresh: ModuleType, name: str) -> None:
    """After a warm-up the first call may be captured; the graph then follows what its tensors hold."""
    function = getattr(fresh, name)
    arguments = decode_batch([5, 17, 300, 0], 200)
    function.warmup(*arguments.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**arguments)
    for seed, lengths in enumerate(([5, 17, 300, 0], [3200, 1, 0, 2222], [64, 65, 128, 3199])):
        later = decode_batch(lengths, 200, seed=seed)
        for argument, tensor in arguments.items():
            tensor.copy_(later[argument])
        graph.replay()
        assert_right(name, later, captured)
        assert_equal(captured, function(**arguments))


@pytest.mark.parametrize("name", ["prefill", "prefill_64"])
def test_a_graph_of_prefill(fresh: ModuleType, name: str) -> None:
    function = getattr(fresh, name)
    arguments = prefill_batch([300, 1, 0, 99], name)
    function.warmup(*arguments.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**arguments)
    for lengths in ([300, 1, 0, 99], [0, 0, 400, 0], [100, 100, 100, 100]):
        later = prefill_batch(lengths, name)
        for argument, tensor in arguments.items():
            tensor.copy_(later[argument])
        graph.replay()
        assert_right(name, later, captured)
        assert_equal(captured, function(**arguments))


def test_two_streams_at_once(module: ModuleType) -> None:
    batches = [decode_batch([3200, 7], 200), decode_batch([1, 2000, 900], 180, seed=1)]
    for arguments in batches:
        with pytest.raises(ValueError, match="workspace"):  # so it needs one: the keys are split
            module.decode(**arguments, workspace=torch.empty(0, device=DEVICE))
    right = [module.decode(**arguments) for arguments in batches]
    synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    found: list[list[Results]] = [[], []]
    for _ in range(50):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[place].append(module.decode(**batches[place]))
    synchronize()
    for place, wanted in enumerate(right):
        for result in found[place]:
            assert_equal(result, wanted)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_graphs_of_repeated_calls_live_on(module: ModuleType, name: str) -> None:
    """Two graphs and calls outside of them, on one stream in turn, each with scratch of its own."""
    function = getattr(module, name)
    batches = [batch(name, 3000, 70), batch(name, 1, 2500)]
    right = [function(**arguments) for arguments in batches]
    captured: list[Results] = []
    graphs = [torch.cuda.CUDAGraph() for _ in batches]
    for graph, arguments in zip(graphs, batches, strict=True):
        function(**arguments)
        with torch.cuda.graph(graph):
            captured.append(function(**arguments))
    for _ in range(20):
        for place, graph in enumerate(graphs):
            for result in captured[place]:
                result.fill_(float("nan"))
            graph.replay()
            assert_equal(function(**batches[1 - place]), right[1 - place])
            assert_equal(captured[place], right[place])


@pytest.mark.parametrize("name", [*DECODES, *PREFILLS])
def test_a_repeated_call_allocates_nothing(module: ModuleType, name: str) -> None:
    arguments = batch(name, 100, 2000)
    outs = [torch.empty_like(result) for result in results(getattr(module, name)(**arguments))]
    given = {**arguments, **dict(zip(("out", "out_lse"), outs, strict=False))}
    for _ in range(3):
        getattr(module, name)(**given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        getattr(module, name)(**given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_repeated_calls_follow_their_tensors(module: ModuleType, name: str) -> None:
    """Launches are repeated with the pointers, and tensor maps, of the call at hand."""
    for seed in range(4):
        arguments = batch(name, 300, 300)
        arguments["query" if name == "decode" else "q"].mul_(seed + 1)
        assert_right(name, arguments, getattr(module, name)(**arguments))


@pytest.mark.skipif("torch.cuda.device_count() < 2")
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_device_that_is_not_current(module: ModuleType, name: str) -> None:
    arguments = batch(name, 100, 2000)
    right = getattr(module, name)(**arguments)
    for _ in range(3):
        there = getattr(module, name)(**{place: tensor.to("cuda:1") for place, tensor in arguments.items()})
        assert_equal(tuple(result.to("cuda:0") for result in results(there)), right)
        assert_equal(getattr(module, name)(**arguments), right)


def test_threads_on_one_stream(module: ModuleType) -> None:
    """A call of two kernels may be interrupted by another's between them."""
    batches = [decode_batch([3200, 7], 200, seed=seed) for seed in range(8)]
    right = [module.decode(**arguments) for arguments in batches]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda arguments: module.decode(**arguments), batches * 50))
    synchronize()
    for place, result in enumerate(found):
        assert_equal(result, right[place % 8])


@pytest.mark.parametrize("name", [*DECODES, *PREFILLS])
def test_a_call_waits_for_nothing(module: ModuleType, name: str) -> None:
    arguments = batch(name, 100, 2000)
    right = getattr(module, name)(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = getattr(module, name)(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(result, right)


def test_the_first_call_from_many_threads(fresh: ModuleType) -> None:
    arguments = decode_batch([9, 700], 60)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fresh.decode(**arguments), range(8)))
    synchronize()
    assert_right("decode", arguments, found[0])
    for result in found[1:]:
        assert_equal(result, found[0])


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_compiled_whole(module: ModuleType, name: str) -> None:
    arguments = batch(name, 100, 300)
    function = getattr(module, name)
    right = function(**arguments)
    torch._dynamo.reset()
    attend = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(attend(*arguments.values()), right)
    given = {place: torch.empty_like(tensor) for place, tensor in zip(("out", "out_lse"), right, strict=True)}
    attend(*arguments.values(), **given)
    assert_equal(tuple(given.values()), right)


# Softmax with an offset that the first keys fix.


@pytest.mark.parametrize("kind", FAILING_TILES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_realistic_inputs(module: ModuleType, kind: str, dtype: str) -> None:
    """Run with -s for the shares of tiles that are computed twice."""
    name, number = {"bf16": ("prefill", torch.bfloat16), "fp16": ("prefill_fp16", torch.float16)}[dtype]
    rows = failing_rows(*queries_and_keys(kind, 8192, 16, 16, 72, number, DEVICE), 72**-0.5)
    share = failing_tiles(rows).double().mean().item()
    print(f"\n{dtype}, {kind}: {rows.double().mean().item():.2%} of rows, {share:.1%} of tiles")
    low, high = FAILING_TILES[kind][dtype]
    assert low <= share <= high
    arguments = packed_arguments(kind, 4096, 4, 2, 72, number, DEVICE)
    assert_right(name, arguments, getattr(module, name)(**arguments))


# Sizes.


def test_more_sequences_than_a_grid_axis_has_blocks(module: ModuleType) -> None:
    arguments = decode_batch([1], 1, heads=1, kv_heads=1, dim=16)
    arguments["query"] = torch.randn(MANY_SEQS, 1, 16, device=DEVICE).bfloat16()
    arguments["block_tables"] = torch.zeros(MANY_SEQS, 1, dtype=torch.int32, device=DEVICE)
    arguments["seq_lens"] = torch.ones(MANY_SEQS, dtype=torch.int32, device=DEVICE)
    out = module.one_head(**arguments)
    assert torch.equal(out, arguments["v_cache"][0, 0].expand(MANY_SEQS, 1, 16))


def test_more_packed_sequences_than_a_grid_axis_has_blocks(module: ModuleType) -> None:
    q, k, v = torch.randn(3, MANY_PACKED, 1, 16, device=DEVICE).bfloat16()
    starts = torch.arange(MANY_PACKED + 1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(module.prefill_one_head(q, k, v, starts, starts), v)


# Bits.


@pytest.mark.parametrize("name", [*DECODES, *PREFILLS])
def test_bits_are_the_same_every_time(module: ModuleType, name: str) -> None:
    arguments = batch(name, 1, 2999, 64)
    right = getattr(module, name)(**arguments)
    for _ in range(REPEATS):
        assert_equal(getattr(module, name)(**arguments), right)


@pytest.mark.parametrize("name", ["fixed", "whole"])
def test_bits_of_a_sequence_do_not_depend_on_its_batch(module: ModuleType, name: str) -> None:
    """Not on the number of sequences, nor on their lengths, nor on how wide the table is."""
    lengths = [2500, *(torch.randint(3200, (63,), generator=torch.Generator().manual_seed(0)).tolist())]
    arguments = decode_batch(lengths, 200)
    whole = getattr(module, name)(**arguments)
    for seqs, width in ((1, 200), (2, 160), (64, 157)):
        part = {place: tensor[:seqs] for place, tensor in arguments.items() if "cache" not in place}
        part["block_tables"] = part["block_tables"][:, :width]
        out, lse = getattr(module, name)(**{**arguments, **part})
        assert torch.equal(out[0], whole[0][0]) and torch.equal(lse[:, 0], whole[1][:, 0])


# Memory.


@pytest.mark.parametrize("name", [*DECODES, *PREFILLS])
def test_unaligned_tensors(module: ModuleType, name: str) -> None:
    inputs = make_inputs(SPEC_OF[name], Case((70, 3), (700, 90)), DEVICE, adversity=Adversity(views="odd"))
    assert inputs.positional[0].data_ptr() % 16
    assert_right(name, dict(inputs), getattr(module, name)(*inputs.positional, **inputs.outputs))
    assert inputs.is_intact


@pytest.mark.parametrize("name", [*DECODES, *PREFILLS])
def test_what_lies_beside_out_is_left_alone(module: ModuleType, name: str) -> None:
    arguments = batch(name, 100, 3000)
    right = getattr(module, name)(**arguments)
    shape = right[0].shape
    buffer = torch.full((shape[0] + 2, shape[1], 2 * shape[2]), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = buffer[1:-1, :, : shape[2]]
    assert_equal(getattr(module, name)(**arguments, out=out), right)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


# Compiled variants.


def variants(module: ModuleType) -> dict[str, int]:
    """How many times each kernel of a module has been compiled."""
    kernels = {name: value for name, value in vars(module).items() if hasattr(value, "device_caches")}
    return {name: sum(len(cached[0]) for cached in kernel.device_caches.values()) for name, kernel in kernels.items()}


def decode_calls() -> Iterator[dict[str, torch.Tensor]]:
    wide = decode_batch(list(range(0, 3200, 97)), 200)
    for seqs in range(1, len(wide["query"]) + 1):
        yield {place: tensor if "cache" in place else tensor[:seqs] for place, tensor in wide.items()}
    for width in range(1, 21):
        yield {**wide, "block_tables": wide["block_tables"][:, :width]}
    for start in range(1, 9):  # views that begin at any multiple of four bytes
        later = {place: tensor if "cache" in place else tensor[start:] for place, tensor in wide.items()}
        yield {**later, "block_tables": later["block_tables"][:, start:]}


def prefill_calls() -> Iterator[dict[str, torch.Tensor]]:
    for tokens in range(1, 65):
        yield prefill_batch([tokens])
    for seqs in (1, 2, 3, 31, 33, 100):
        yield prefill_batch([3] * seqs)
    for place in range(1, 9):
        arguments = prefill_batch([5] * 10)
        yield {**arguments, **{name: arguments[name][place:] for name in ("cu_seqlens_q", "cu_seqlens_k")}}


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_few_variants_and_none_after_the_warm_up(fresh: ModuleType, name: str) -> None:
    calls = decode_calls() if name == "decode" else prefill_calls()
    first = next(calls)
    getattr(fresh, name).warmup(*first.values())
    warm = variants(fresh)
    assert 0 < max(warm.values()) <= MOST_VARIANTS, warm
    getattr(fresh, name)(**first)
    assert variants(fresh) == warm, "the call that was the warm-up's example"
    for arguments in calls:
        getattr(fresh, name)(**arguments)
    assert variants(fresh) == warm, "calls of other lengths, batches and tables"


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_no_variant_after_the_warm_up_for_unaligned_tensors(fresh: ModuleType, name: str) -> None:
    case = Case((70, 3), (700, 90))
    getattr(fresh, name).warmup(*make_inputs(SPEC_OF[name], case, DEVICE).positional)
    warm = variants(fresh)
    inputs = make_inputs(SPEC_OF[name], case, DEVICE, adversity=Adversity(views="odd"))
    getattr(fresh, name)(*inputs.positional, **inputs.outputs)
    assert variants(fresh) == warm


# Last, because a wrong address ends the use of the GPU by this process.


def far(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A view of a buffer of more than 2^31 elements."""
    return torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device=DEVICE).as_strided(shape, strides)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_a_page_beyond_31_bits(module: ModuleType) -> None:
    cache = far((2049, 16, 1, 16), (2**20, 16, 16, 1))
    cache[2048], cache[0] = 3.0, 5.0
    query = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    out = module.one_head(query, cache, cache, index(2048).view(1, 1), index(16))
    assert (out == 3.0).all()


def test_heads_and_tokens_beyond_31_bits(module: ModuleType) -> None:
    cache = far((2, 16, 2, 64), (2**19, 64, 2**31, 1))
    cache[1, :, 0], cache[1, :, 1] = 3.0, 5.0
    query = torch.zeros(1, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    out, _ = module.decode(query, cache, cache, index(1).view(1, 1), index(16))
    assert (out[:, :4] == 3.0).all() and (out[:, 4:] == 5.0).all()
    tokens = far((2, 2, 64), (2**31, 64, 1))
    tokens[0], tokens[1] = 3.0, 5.0
    query = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    out, _ = module.prefill_64(query, tokens, tokens, index(0, 1), index(0, 2))
    assert (out == 4.0).all()
