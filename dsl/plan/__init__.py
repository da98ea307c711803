"""Plan: decide how each block is computed, and refuse what no plan target can.

One public function, `plan_module`; what a target decides for a family stands in that family's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TypeVar

from dsl.architecture import ARCHITECTURES, UNLISTED
from dsl.diagnostics import SpecError
from dsl.plan import decode, decode_hopper, paged, prefill, prefill_hopper
from dsl.plan.expressions import expressions
from dsl.plan.launch import decode_launch, paged_launch, prefill_launch
from dsl.plan.merge import merge
from dsl.plan.module import (
    BlockPlan,
    Config,
    DecodeHopperPlan,
    ExpressionPlan,
    FunctionPlan,
    HopperPlan,
    KernelPlan,
    LaunchPlan,
    MergePlan,
    ModulePlan,
)
from dsl.plan.refuse import refusals, target_refusals
from dsl.plan.shaping import Shaping, has_expressions, without_idle_mask
from dsl.source import Source
from dsl.spec import Spec, SpecFile

__all__ = ["BlockPlan", "ModulePlan", "computed", "plan_module"]

_KERNELS: dict[str, ModuleType] = {"decode": decode, "prefill": prefill, "paged": paged}
_TITLES = {
    "decode": "one query token per sequence over a paged cache",
    "prefill": "packed sequences, every query token sees its whole key sequence",
    "paged": "packed query tokens over a paged cache",
}
Text = TypeVar("Text", KernelPlan, LaunchPlan)


def plan_module(file: SpecFile, targets: Sequence[str] | None = None) -> ModulePlan:
    """Plan all blocks of a file for the given plan targets, or for all that there are.

    Raises SpecError with every refusal of the file, each at the field that asks for what cannot be done.
    """
    found = [refusal for spec in file.attentions for refusal in (*refusals(spec), *target_refusals(spec, targets))]
    if found:
        raise SpecError(file.source, found)
    kernels: list[KernelPlan] = []
    launches: list[LaunchPlan] = []
    specs = {spec.name: computed(spec) for spec in file.attentions}
    against = {name: _against_hopper(spec, targets) for name, spec in specs.items()}
    hopper = {spec.family for spec in file.attentions if against[spec.name] is None}
    blocks: dict[str, BlockPlan] = {}
    for spec in file.attentions:
        plan = _plan_block(specs[spec.name], file.source, against[spec.name], spec.family in hopper, kernels, launches)
        blocks[spec.name] = replace(plan, spec=spec)
    functions = [FunctionPlan(name, (block,), None, _title((block,))) for name, block in blocks.items()]
    for dispatch in file.dispatches:
        members = tuple(blocks[name] for name in dispatch.blocks)
        functions.append(FunctionPlan(dispatch.name, members, f"_{dispatch.name}_blocks", _title(members)))
    return ModulePlan(file, file.source.stem, tuple(kernels), tuple(launches), tuple(blocks.values()), tuple(functions))


def computed(spec: Spec) -> Spec:
    """A block as its kernels compute it: without a mask that hides nothing."""
    return without_idle_mask(spec, _KERNELS[spec.family].surroundings(spec))


def _title(blocks: tuple[BlockPlan, ...]) -> str:
    spec = blocks[0].spec
    if len(blocks) > 1:
        return f"{_TITLES[spec.family].capitalize()}; chooses among {len(blocks)} blocks."
    dims = str(spec.head_dim_qk) if spec.head_dim_qk == spec.head_dim_v else f"{spec.head_dim_qk}/{spec.head_dim_v}"
    return f"{_TITLES[spec.family].capitalize()}: {spec.dtype}, heads {spec.heads}/{spec.kv_heads}, head_dim {dims}."


def _launch(spec: Spec, shaping: Shaping, extra: ExpressionPlan, hopper: bool) -> LaunchPlan:
    name = f"_{spec.family}"
    may_miss = any(function.field == "outside" for function in extra.functions)
    hopper = hopper and not has_expressions(spec)
    if spec.family == "decode":
        bounded = extra.most_keys is not None and spec.split.kind == "auto"
        return replace(decode_launch(spec, name, shaping, bounded, hopper), may_miss=may_miss)
    if spec.family == "paged":
        return replace(paged_launch(spec, name, shaping), may_miss=may_miss)
    return replace(prefill_launch(spec, name, shaping, hopper), may_miss=may_miss)


def _against_hopper(spec: Spec, targets: Sequence[str] | None) -> str | None:
    """Why a block has no Hopper kernel, None where it has."""
    if targets is not None and "hopper" not in targets:
        return "the build leaves the target out"
    if spec.family == "paged":
        return "no Hopper kernel takes packed queries over a paged cache"
    return {"decode": decode_hopper, "prefill": prefill_hopper}[spec.family].reason_against(spec)


def _plan_block(
    spec: Spec,
    source: Source,
    no_hopper: str | None,
    any_hopper: bool,
    kernels: list[KernelPlan],
    launches: list[LaunchPlan],
) -> BlockPlan:
    family = _KERNELS[spec.family]
    kernel, constants = family.kernel(spec, f"_{spec.family}_kernel", source)
    shaping = kernel.shaping
    extra = expressions(spec, source, shaping, family.surroundings(spec))
    launch = _launch(spec, shaping, extra, any_hopper)
    merging: MergePlan | None = None
    if extra.bounds is not None:
        extra = replace(extra, bounds=_share(extra.bounds, kernels))
    kernel = _share(kernel, kernels)
    if spec.family == "decode" and spec.split.kind != "none":
        merging = merge(spec, "_merge_kernel")
        merging = replace(merging, kernel=_share(merging.kernel, kernels))
    hopper: HopperPlan | None = None
    decode_plan: DecodeHopperPlan | None = None
    if no_hopper is None and spec.family == "decode":
        decode_plan = _share_all(decode_hopper.hopper(spec, "_decode_hopper_kernel"), kernels)
    if no_hopper is None and spec.family == "prefill":
        hopper = prefill_hopper.hopper(spec, f"_{spec.family}_hopper_kernel")
        hopper = replace(hopper, kernel=_share(hopper.kernel, kernels))
        hopper = replace(hopper, merge=replace(hopper.merge, kernel=_share(hopper.merge.kernel, kernels)))
    configs, unfit = _fit(spec, family)
    place = (f"{source.stem}.attn", source.position(spec.spans["name"].start)[0])
    launch = _share(launch, launches)
    return BlockPlan(
        spec, kernel, launch, merging, hopper, decode_plan, no_hopper, extra, constants, configs, unfit, place
    )


def _share_all(plan: DecodeHopperPlan, kernels: list[KernelPlan]) -> DecodeHopperPlan:
    """The plan with kernels that it shares with others."""
    registers = plan.registers and replace(plan.registers, kernel=_share(plan.registers.kernel, kernels))
    merge = plan.merge and _share(plan.merge, kernels)
    return replace(plan, kernel=_share(plan.kernel, kernels), registers=registers, merge=merge)


def _share(text: Text, known: list[Text]) -> Text:
    """The equal text that is already planned, or this one under a name of its own."""
    for other in known:
        if other == text:
            return other
    taken = {other.name for other in known}
    number = 2
    name = text.name
    while name in taken:
        name, number = f"{text.name}_{number}", number + 1
    text = replace(text, name=name)
    known.append(text)
    return text


def _fit(spec: Spec, family: ModuleType) -> tuple[dict[str, Config], dict[str, int]]:
    """The best tiles that fit each architecture, those equal to the default left out; and the bytes where none fit."""
    chosen: dict[str, Config] = {}
    unfit: dict[str, int] = {}
    for chip in (UNLISTED, *ARCHITECTURES):
        candidates = family.configs(spec, chip)
        fitting = [config for config in candidates if config.shared_bytes <= chip.shared_bytes]
        if fitting:
            chosen[chip.name] = fitting[0]
        else:
            unfit[chip.name] = min(config.shared_bytes for config in candidates)
    assert chosen, "the smallest tiles of any block fit the chips with the most shared memory"
    default = chosen.pop(UNLISTED.name, None)
    unfit.pop(UNLISTED.name, None)
    smallest = default or min(chosen.values(), key=lambda config: config.shared_bytes)
    configs = {"default": smallest, **{name: config for name, config in chosen.items() if config != smallest}}
    return {**configs, **family.named_configs(spec)}, unfit
