"""Explain: what the plan makes of a spec, in words and numbers, for an engineer who wants to know why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath

from dsl.architecture import ARCHITECTURES, architecture
from dsl.derivation import derivation
from dsl.layout import DimPiece, contiguous_slots
from dsl.plan import plan_module
from dsl.plan.cost import (
    case_title,
    cost,
    decode_programs,
    decode_share,
    num_splits,
    paged_config,
    prefill_programs,
    query_lengths,
    table_width,
)
from dsl.plan.launch import DecodeLaunch, PagedLaunch
from dsl.plan.module import BlockPlan, Config, DecodeHopperPlan, FunctionPlan, ModulePlan
from dsl.plan.prefill_hopper import ARCHITECTURE as HOPPER
from dsl.plan.prefill_hopper import speculates
from dsl.plan.refuse import BASE, TARGETS
from dsl.plan.tiles import head_dim_pieces
from dsl.plan.tuned import tuned
from dsl.printer import print_expression
from dsl.spec import ITEMSIZE, Case, Layout, Spec, SpecFile

TYPICAL_GPU = ("sm90", 132)
"""The architecture and the processors for which grids and splits are worked out: an H100 or H200."""
VECTOR_BYTES = 16
_WIDTH = 110
_LABEL = 12


def explain(spec_file: SpecFile) -> str:
    """The plan of every block of a file. Raises SpecError where there is no plan."""
    plan = plan_module(spec_file)
    sections = [_summary(plan), *(_block(plan, block) for block in plan.blocks)]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _summary(plan: ModulePlan) -> Iterator[str]:
    name, _ = TYPICAL_GPU
    yield f"{PurePath(plan.file.source.name).name} becomes {plan.stem}.py, {_targets(plan)}"
    for kernel in plan.kernels:
        users = [block.spec.name for block in plan.blocks if kernel in _kernels(block)]
        yield from _field("kernel", f"{kernel.name}: {', '.join(users)}")
    for launch in plan.launches:
        users = [block.spec.name for block in plan.blocks if block.launch is launch]
        yield from _field("launcher", f"_launch{launch.name}: {', '.join(users)}")
    for dispatch in plan.dispatches:
        yield from _field("dispatch", _signature(dispatch))
        yield from _field("", _choice(dispatch))
    yield from _field("variants", f"{_module_variants(plan)} kernels compiled on {name} once everything has been used")


def _targets(plan: ModulePlan) -> str:
    return f"for the targets {' and '.join(TARGETS)}" if plan.has_hopper else f"for the target {BASE}"


def _block(plan: ModulePlan, block: BlockPlan) -> Iterator[str]:
    spec = block.spec
    function = next(function for function in plan.functions if function.name == spec.name)
    line, _ = plan.file.source.position(spec.spans["name"].start)
    yield f"{spec.name} ({PurePath(plan.file.source.name).name}:{line})"
    yield from _field("function", _signature(function))
    yield from _field("launcher", f"_launch{block.launch.name}")
    yield from _field("kernel", _kernel(plan, block))
    yield from _field("on Hopper", _hopper(block))
    yield from _field("heads", f"{spec.heads} query heads, {spec.kv_heads} KV heads, {_heads(block)}")
    yield from _field("head_dim", _head_dim(spec))
    for label, text in _tensors(block):
        yield from _field(label, text)
    cases = [case for workload in plan.file.workloads if workload.block == spec.name for case in workload.cases]
    yield from _labelled("mask", _mask(block, cases))
    for label, text in _expressions(spec):
        yield from _field(label, text)
    yield from _labelled("tiles", _tiles(block))
    yield from _labelled("does not fit", (_unfit(name, needed) for name, needed in block.unfit.items()))
    yield from _field("grid", _grid(block))
    if isinstance(block.launch, DecodeLaunch):
        yield from _field("splits", _split_rule(block))
    yield from _field("variants", _variants(block))
    yield from _labelled("workload", (_case(block, case) for case in cases) if cases else ["none"])


def _field(label: str, text: str) -> list[str]:
    """A labelled paragraph with a hanging indent."""
    indent = " " * (_LABEL + 3)
    first = f"  {label:{_LABEL}} "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _labelled(label: str, texts: Iterable[str]) -> Iterator[str]:
    """Paragraphs of which the first carries the label."""
    for number, text in enumerate(texts):
        yield from _field("" if number else label, text)


def _signature(function: FunctionPlan) -> str:
    launch = function.launch
    results = (f"{name}=None" for name in launch.result_names)
    keywords = (*(param.name for param in launch.params), *results, "workspace=None", "check=False")
    return f"{function.name}({', '.join((*launch.arguments, '*', *keywords))}) -> {launch.returns}"


def _choice(dispatch: FunctionPlan) -> str:
    """What a dispatch chooses by."""
    names = ["dtype", "heads", "KV heads", "head dimensions"]
    if dispatch.blocks[0].spec.block is not None:
        names.append("page size")
    return f"chooses among {_count(len(dispatch.blocks), 'block')} by {', '.join(names)}"


def _kernels(block: BlockPlan) -> tuple[object, ...]:
    hopper = (block.hopper, block.hopper.merge) if block.hopper else ()
    paged = block.decode_hopper.kernels if block.decode_hopper else ()
    return (block.kernel, *(plan.kernel for plan in (block.merge, *hopper) if plan), *paged)


def _kernel(plan: ModulePlan, block: BlockPlan) -> str:
    others = sum(other.kernel is block.kernel for other in plan.blocks) - 1
    shared = f" (shared with {_count(others, 'more block')})" if others else ""
    merging = f", then {block.merge.kernel.name} where there is more than one split" if block.merge else ""
    return f"{block.kernel.name}{shared}{merging}"


def _hopper(block: BlockPlan) -> str:
    """Which kernel sm90 runs, and why."""
    if block.decode_hopper:
        return _decode_hopper(block, block.decode_hopper)
    if isinstance(block.launch, PagedLaunch):
        return f"{block.kernel.name}; {block.no_hopper}"
    if block.hopper is None:
        return f"{block.kernel.name}; there is a Hopper kernel, but {block.no_hopper}"
    sizes = " ".join(f"{name} {block.hopper.constants[name]}" for name in ("BLOCK_Q", "BLOCK_KV", "STAGES"))
    return (
        f"{block.hopper.kernel.name}: {sizes}, {block.hopper.shared_bytes:,} bytes of shared memory at most, then "
        f"{block.hopper.merge.kernel.name} where tiles are split; where Triton's version is from 3.6 to 3.9, and bases "
        f"and strides of q, k, v and out are multiples of 16 bytes (else {block.kernel.name}); {_softmax(block.spec)}"
    )


def _decode_hopper(block: BlockPlan, plan: DecodeHopperPlan) -> str:
    """The kernels of a decode on sm90, how keys are shared out, and what sends a call to the portable kernel."""
    numbers, work = plan.constants, plan.work
    boxes = " and ".join(f"{tensor} in boxes of {list(box)}" for tensor, _, box, _ in plan.maps.values())
    deep = f"{plan.stages[0]} to {plan.stages[-1]} stages of {plan.tile_bytes:,} bytes"
    texts = [f"{plan.kernel.name}: one warp a program, TILE {numbers['TILE']}, {boxes}, a ring of {deep}"]
    if "BALANCED" in plan.kernel.constants:
        texts.append(
            f"keys are shared out evenly among up to {min(work.programs, plan.resident)} programs a processor, by "
            f"lengths that the device reads, then {plan.merge.name if plan.merge else ''}; whole sequences where there "
            f"are more of them and a row of the table holds at most {work.whole_keys} keys"
        )
    elif plan.merge:
        texts.append(f"parts of {numbers['SPLIT_KEYS']} keys, then {plan.merge.name}")
    if plan.registers:
        texts.append(
            f"{plan.registers.kernel.name} for up to {work.registers_bytes // 10**6} MB of keys and values, in at most "
            f"{work.registers_programs} parts a processor"
        )
    texts.append(
        f"where Triton's version is from 3.6 to 3.9, bases and strides are multiples of 16 bytes, and pages have no "
        f"gaps that a box would span (else {block.kernel.name})"
    )
    return "; ".join(texts)


def _softmax(spec: Spec) -> str:
    """How the Hopper kernel computes the softmax, and why."""
    if speculates(spec):
        return (
            "the maximum of the first BLOCK_KV keys is the softmax's offset; rows whose sums overflow with it are "
            "computed again with a running maximum (`softmax = online` always keeps one)"
        )
    why = "`softmax` asks for it" if spec.softmax == "online" else "fp16 has no room for a guess"
    return f"the softmax keeps a running maximum: {why}"


def _heads(block: BlockPlan) -> str:
    group = block.spec.group
    if isinstance(block.launch, PagedLaunch):
        return f"{group} to each KV head; a row of a tile is a query token and one of them"
    if "GROUP_TILE" not in block.constants:
        return f"{group} to each KV head"
    tile, tiles = block.constants["GROUP_TILE"], block.constants["HEAD_TILES"]
    return f"{group} to each KV head in {_count(int(tiles), 'tile')} of {tile} rows"


def _head_dim(spec: Spec) -> str:
    qk, v, _ = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    if spec.head_dim_qk == spec.head_dim_v:
        return _pieces(spec.head_dim_qk, qk)
    return f"QK {_pieces(spec.head_dim_qk, qk)}; V {_pieces(spec.head_dim_v, v)}"


def _pieces(dim: int, pieces: tuple[DimPiece, ...]) -> str:
    """`72 = 64 + 16, of which 8 live`."""
    if len(pieces) == 1 and pieces[0].extent == dim:
        return f"{dim}, one piece"
    live = dim - pieces[-1].offset
    padded = f", of which {live} live" if live < pieces[-1].extent else ""
    return f"{dim} = {' + '.join(str(piece.extent) for piece in pieces)}{padded}"


def _tensors(block: BlockPlan) -> Iterator[tuple[str, str]]:
    """Each tensor's layout and how its tiles are addressed."""
    spec = block.spec
    query, *cached = spec.arguments
    yield query, _layout(spec.q_layout, spec, spec.dtype)
    caches = {access.tensor: access for access in getattr(block.kernel, "caches", ())}
    layouts = (spec.k_layout,) if spec.shared_kv else (spec.k_layout, spec.v_layout)
    for name, layout in zip(cached, layouts, strict=False):
        text = _layout(layout, spec, spec.kv_dtype)
        if access := caches.get(name):
            lookup = "each chunk of slots" if access.chunked else "each token"
            shapes = " and ".join(tile.shape for tile in access.tiles)
            text += f"; a page is looked up for {lookup}; tile {shapes} at {access.tiles[0].address}"
        yield name, text
    yield "out", _layout(spec.out_layout, spec, spec.dtype)


def _mask(block: BlockPlan, cases: list[Case]) -> Iterator[str]:
    """What is known of a mask, with the typical GPU's tiles, and the longest sequence of a workload as an example."""
    name, _ = TYPICAL_GPU
    config = block.config(name)
    if not block.spec.has_mask or config is None:
        return
    rows, keys = config.constants.get("BLOCK_Q", 1), config.constants.get("BLOCK_KV") or config.constants["TILE"]
    if isinstance(block.launch, PagedLaunch):
        rows = -(-rows // block.spec.group)  # as query tokens
    lengths = [pair for case in cases for pair in zip(query_lengths(block.spec, case), case.kv_lens, strict=True)]
    q_len, kv_len = max(lengths, key=lambda pair: pair[1], default=(4096, 4096))
    yield from derivation(block, rows, keys, 1 if block.spec.query == "single" else q_len, kv_len)


def _expressions(spec: Spec) -> Iterator[tuple[str, str]]:
    """The other expressions, and where they stand in the computation."""
    if spec.has_score:
        yield "score", f"{print_expression(spec.score)}: in float32, after the scale and before the mask"
    if spec.sink is not None:
        split = "" if spec.split.kind == "none" or spec.query != "single" else ", which the first split alone carries"
        yield "sink", f"{print_expression(spec.sink)}: one more logit of each row{split}"
    for param in spec.params:
        what = f"a tensor [{', '.join(map(str, param.axes))}]" if param.axes else "a number"
        yield "param", f"{param.name}: {what} of type {param.dtype}"


def _layout(layout: Layout, spec: Spec, dtype: str) -> str:
    last = layout[-1]
    shown = f"[{', '.join(map(str, layout))}], contiguous along {last}"
    if last.name == "slot":
        assert spec.block is not None
        run = contiguous_slots(layout, spec.block)
        return f"{shown}: chunks of up to {run} slots, {_loads(run * ITEMSIZE[dtype])}"
    if last.part == "inner":
        return f"{shown}: runs of {last.factor} elements, {_loads(last.factor * ITEMSIZE[dtype])}"
    return shown


def _loads(size: int) -> str:
    if size <= VECTOR_BYTES:
        return f"one load of {size} bytes"
    return f"{size // VECTOR_BYTES} loads of {VECTOR_BYTES} bytes"


def _tiles(block: BlockPlan) -> Iterator[str]:
    """One line for all architectures that run the same tiles."""
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for chip in ARCHITECTURES:
        config = block.config(chip.name)
        if config is not None:
            groups.setdefault(tuple(config.entries.items()), []).append(chip.name)
    for names in groups.values():
        config = block.config(names[0])
        assert config is not None
        yield f"{_config(config)}: {', '.join(name + _origin(block, name, config) for name in names)}"
    if "low" in block.configs:
        rows = block.configs["low"].constants["BLOCK_Q"]
        few = f"batches of at most {rows} rows a sequence on average"
        yield f"{_config(block.configs['low'])}: {few}, and tensors that cannot be read in loads of 16 bytes"
    elif "unaligned" in block.configs:
        yield f"{_config(block.configs['unaligned'])}: tensors that cannot be read in loads of 16 bytes"


def _origin(block: BlockPlan, name: str, config: Config) -> str:
    measured = tuned(block.spec, name)
    is_measured = measured is not None and measured.items() <= config.entries.items()
    return " (measured)" if is_measured else ""


def _config(config: Config) -> str:
    sizes = " ".join(f"{name} {size}" for name, size in config.constants.items())
    warps, stages = _count(config.num_warps, "warp"), _count(config.num_stages, "stage")
    return f"{sizes}, {warps}, {stages}, at most {config.shared_bytes:,} bytes of shared memory"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _unfit(name: str, needed: int) -> str:
    return f"{name}: needs {needed:,} bytes of shared memory, has {architecture(name).shared_bytes:,}"


def _grid(block: BlockPlan) -> str:
    if isinstance(block.launch, DecodeLaunch):
        tiles = block.constants["HEAD_TILES"]
        return f"(seqs * {block.spec.kv_heads} KV heads * {_count(int(tiles), 'tile')} of query heads, splits)"
    if isinstance(block.launch, PagedLaunch):
        return f"(q_tokens * {block.spec.group} // BLOCK_Q + seqs + 2, {block.spec.kv_heads} KV heads)"
    return f"(q_tokens // BLOCK_Q + seqs + 2, {block.spec.heads} heads)"


def _split_rule(block: BlockPlan) -> str:
    spec, launch = block.spec, block.launch
    assert isinstance(launch, DecodeLaunch)
    if spec.split.kind == "none":
        return "none: one program reads all keys of a sequence"
    if spec.split.kind == "fixed":
        return f"fixed: parts of {spec.split.keys} keys, as many as a row of the table can hold"
    return (
        f"auto: {launch.programs_per_processor} * processors // programs, from 1 to {launch.maximum_splits}, of at "
        f"least {launch.tiles_per_split} tiles each unless processors would idle; programs = grid[0], tiles = keys of "
        "a row of the table / TILE"
    )


def _variants(block: BlockPlan) -> str:
    choices = "loads of 16 bytes or of one element"
    if "INDEX" in block.kernel.constants:
        choices += ", 32-bit or 64-bit offsets within a page or tile"
    if "low" in block.configs:
        choices += ", low tiles or the chip's"
    others = "".join(f"; 1 of {plan.kernel.name}" for plan in (block.merge, block.hopper) if plan)
    if block.hopper:
        others += f"; {len(block.hopper.merged_splits)} of {block.hopper.merge.kernel.name}"
    others += "".join(f"; {number} of {kernel}" for kernel, number in _decode_variants(block).items())
    return f"{_choices(block)} of {block.kernel.name}: {choices}{others}"


def _decode_variants(block: BlockPlan) -> dict[str, int]:
    """How often each Hopper kernel of a decode is compiled."""
    plan = block.decode_hopper
    if plan is None:
        return {}
    ways = 2 if "BALANCED" in plan.kernel.constants else 1
    variants = {plan.kernel.name: ways * len(plan.stages)}
    if plan.registers:
        variants[plan.registers.kernel.name] = len(plan.registers.shapes)
    if plan.merge:
        variants[plan.merge.name] = ways * len(plan.merge_shapes)
    return variants


def _choices(block: BlockPlan) -> int:
    """How often a portable kernel is compiled: tensors that are not aligned take low tiles, where there are any."""
    loads = 3 if block.configs.get("low", block.config(TYPICAL_GPU[0])) != block.config(TYPICAL_GPU[0]) else 2
    return loads * (2 if "INDEX" in block.kernel.constants else 1)


def _module_variants(plan: ModulePlan) -> int:
    """Kernels that differ in their text, dtype, constants or tiles; blocks that agree in all of them share one."""
    name, _ = TYPICAL_GPU
    kernels: dict[object, int] = {}
    for block in plan.blocks:
        config = block.config(name)
        if config is None:
            continue
        dtype = block.spec.dtype
        kernels[block.kernel.name, dtype, _frozen(block.constants), _frozen(config.entries)] = _choices(block)
        if block.merge:
            kernels[block.merge.kernel.name, dtype, _frozen(block.merge.entries)] = 1
        if block.hopper and name == HOPPER:
            kernels[block.hopper.kernel.name, dtype, _frozen(block.hopper.entries)] = 1
            merges = len(block.hopper.merged_splits)
            kernels[block.hopper.merge.kernel.name, dtype, _frozen(block.hopper.merge.entries)] = merges
        if (paged := block.decode_hopper) and name == HOPPER:
            numbers = {paged.kernel.name: paged.constants}
            if paged.registers:
                numbers[paged.registers.kernel.name] = paged.registers.constants
            if paged.merge:
                numbers[paged.merge.name] = paged.merge_constants
            for text, count in _decode_variants(block).items():
                kernels[text, dtype, _frozen(numbers[text])] = count
    return sum(kernels.values())


def _frozen(numbers: Mapping[str, int | float]) -> frozenset[tuple[str, int | float]]:
    return frozenset(numbers.items())


def _case(block: BlockPlan, case: Case) -> str:
    spec = block.spec
    needs = cost(spec, case)
    return (
        f"{case_title(spec, case)}: {_scaled(needs.bytes, 'B')}, {_scaled(needs.flops, 'FLOP')}, "
        f"{_figure(needs.intensity)} FLOP/B; {_launched(block, case)}"
    )


def _launched(block: BlockPlan, case: Case) -> str:
    """The grid of a case on the typical GPU."""
    name, processors = TYPICAL_GPU
    config = block.config(name)
    if config is None:
        return f"does not fit {name}"
    seqs, spec_block = len(case.kv_lens), block.spec.block
    where = f"on {name} with {processors} processors"
    if block.decode_hopper and name == HOPPER:
        assert spec_block is not None
        items, capacity = seqs * block.spec.kv_heads, table_width(block.spec, case) * spec_block
        share = decode_share(block.decode_hopper, items, capacity, processors)
        words = {
            "registers": f"{items} x {_count(share.parts, 'part')} in registers",
            "whole": f"{items} whole sequences and KV heads",
            "parts": f"{items} x {_count(share.parts, 'fixed part')}",
            "balanced": f"{share.programs} equal shares",
        }
        ring = f", {_count(share.stages, 'stage')}" if share.stages else ""
        return f"{words[share.way]}{ring} {where}"
    if isinstance(block.launch, DecodeLaunch):
        splits = num_splits(block, config.entries, seqs, table_width(block.spec, case), processors)
        return f"{decode_programs(block, seqs)} programs x {_count(splits, 'split')} {where}"
    tokens = sum(query_lengths(block.spec, case))
    if isinstance(block.launch, PagedLaunch):
        rows, chosen = tokens * block.spec.group, paged_config(block, config, tokens, seqs)
        tiles = f"tiles of {chosen.constants['BLOCK_Q']} rows"
        return f"{prefill_programs(chosen.entries, rows, seqs)} x {block.spec.kv_heads} programs, {tiles}, on {name}"
    if block.hopper and name == HOPPER:
        rows = block.hopper.constants["BLOCK_Q"]
        return f"tiles of 64 to {rows} rows in at most {processors} programs on {name}"
    return f"{prefill_programs(config.entries, tokens, seqs)} x {block.spec.heads} programs on {name}"


def _scaled(number: int, unit: str) -> str:
    """`1.5 MB`: three digits and a decimal prefix."""
    value, prefixes = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{_figure(value)} {prefixes[0]}{unit}"


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
