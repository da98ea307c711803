"""The fields that take a word or a number, one rule each."""

from __future__ import annotations

from dsl import nodes
from dsl.check.draft import Draft
from dsl.diagnostics import near, nearest, one_of, quote
from dsl.source import Span
from dsl.spec import FAMILIES, Split

FIELDS = (
    "query",
    "kv",
    "dtype",
    "kv_dtype",
    "heads",
    "head_dim",
    "q",
    "k",
    "v",
    "out",
    "k_cache",
    "v_cache",
    "mask",
    "score",
    "sink",
    "scale",
    "lse",
    "split",
    "softmax",
    "targets",
)
REQUIRED = ("query", "kv", "dtype", "heads", "head_dim")

DTYPES = ("bf16", "fp16", "fp32")
QUANTISED = ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "int8")
TARGETS = ("portable", "hopper")
_SCALE_AXES = {
    "paged": (("kv_head",), ("seq", "kv_head"), ("block", "slot", "kv_head")),
    "other": (("kv_head",), ("seq", "kv_head")),
}
_LARGEST_HEAD_DIM = 576
_SPLIT_STEP = 64

_BELONGS = {
    "window": "a window is a mask: `mask = causal and q - kv < 128`",
    "causal": "write `mask = causal`",
    "softcap": "a soft cap is a score: `score = softcap(score, 30)`",
    "alibi": "write `score = score + alibi(h) * (kv - q)`",
    "kv_heads": "write `heads = H / KV`",
    "num_heads": "write `heads = H` or `heads = H / KV`",
    "block": "write `kv = paged(block = 16)`",
    "block_size": "write `kv = paged(block = 16)`",
    "page_size": "write `kv = paged(block = 16)`",
    "layout": "each tensor has its own layout: `q`, `k`, `v`, `out`, `k_cache`, `v_cache`",
    "sinks": "write `param sinks[head] : fp32` and `sink = sinks[h]`",
    "k_scale": "write `kv_dtype = fp8_e4m3`: the scales are arguments then",
    "v_scale": "write `kv_dtype = fp8_e4m3`: the scales are arguments then",
}


def known_fields(draft: Draft) -> None:
    for name, field in draft.fields.items():
        if name not in FIELDS and name not in draft.inherited:
            advice = _advice(name)
            draft.error("ATTN203", field.name.span, f"there is no field {quote(name)}", advice)


def _advice(name: str) -> str | None:
    """What to write instead of an unknown field."""
    if name in _BELONGS:
        return _BELONGS[name]
    match = nearest(name, (*FIELDS, *_BELONGS))
    return _BELONGS.get(match or "") or near(name, FIELDS)


def required_fields(draft: Draft) -> None:
    missing = [name for name in REQUIRED if draft.is_missing(name)]
    if missing and draft.name:
        word = "field" if len(missing) == 1 else "fields"
        names = ", ".join(quote(name) for name in missing)
        draft.error("ATTN205", draft.place, f"block {quote(draft.name)} lacks the {word} {names}")


def query(draft: Draft) -> None:
    found = _kind(draft, "query", ("single", "packed", "batched"), {"packed": "max"}, optional=True)
    if found:
        draft.values["query"], draft.values["query_max"] = found


def kv(draft: Draft) -> None:
    found = _kind(draft, "kv", ("packed", "paged", "batched"), {"paged": "block"}, optional=False)
    if found:
        draft.values["kv"], draft.values["block"] = found


def family(draft: Draft) -> None:
    kinds = draft.get("query", "kv")
    if kinds is None or tuple(kinds) in FAMILIES:
        return
    pairs = "; ".join(f"{query} with {kv}" for query, kv in FAMILIES)
    message = f"a {kinds[0]} query does not go with {kinds[1]} keys and values"
    draft.error("ATTN214", draft.fields["kv"].value.span, message, f"the pairs are {pairs}")
    del draft.values["query"], draft.values["kv"]


def dtype(draft: Draft) -> None:
    chosen = _choice(draft, "dtype", DTYPES)
    if chosen:
        draft.values["dtype"] = chosen


def kv_dtype(draft: Draft) -> None:
    value = draft.value("kv_dtype")
    if value is None:
        if draft.is_missing("kv_dtype") and "dtype" in draft.values:
            draft.values.update(kv_dtype=draft.values["dtype"], kv_scale_axes=None)
        return
    axes = value.axes if isinstance(value, nodes.Scaled) else None
    name = value.dtype if isinstance(value, nodes.Scaled) else value
    if not isinstance(name, nodes.Name):
        draft.error("ATTN301", value.span, "`kv_dtype` takes a type", f"one of {one_of(DTYPES + QUANTISED)}")
    elif name.text in QUANTISED:
        scale_axes = _scale_axes(draft, axes)
        if scale_axes is not None:
            draft.values.update(kv_dtype=name.text, kv_scale_axes=scale_axes)
    elif name.text not in DTYPES:
        _unknown_word(draft, "kv_dtype", name, DTYPES + QUANTISED)
    elif axes is not None:
        draft.error("ATTN305", axes.span, f"{quote(name.text)} takes no scales", f"with scales: {one_of(QUANTISED)}")
    elif "dtype" in draft.values and name.text != draft.values["dtype"]:
        other = draft.values["dtype"]
        message = f"`kv_dtype = {name.text}` does not go with `dtype = {other}`"
        draft.error("ATTN305", name.span, message, f"write `{other}`, or one of {one_of(QUANTISED)}")
    else:
        draft.values.update(kv_dtype=name.text, kv_scale_axes=None)


def _scale_axes(draft: Draft, axes: nodes.List | None) -> tuple[str, ...] | None:
    if axes is None:
        return ()
    if "kv" not in draft.values:
        return None
    allowed = _SCALE_AXES["paged" if draft.values["kv"] == "paged" else "other"]
    names = tuple(axis.text if isinstance(axis, nodes.Name) else "" for axis in axes.items)
    if names in allowed:
        return names
    choices = one_of([f"per [{', '.join(choice)}]" for choice in allowed])
    message = f"scales of {draft.values['kv']} keys and values have other axes"
    draft.error("ATTN305", axes.span, message, f"write {choices}")
    return None


def heads(draft: Draft) -> None:
    pair = _pair(draft, "heads", "`H` or `H / KV`, such as `32` or `32 / 8`")
    if pair is None:
        return
    (heads, heads_place), (kv_heads, kv_place) = pair
    if heads < 1 or kv_heads < 1:
        draft.error("ATTN303", heads_place if heads < 1 else kv_place, "there must be at least one head")
    elif heads % kv_heads:
        message = f"{heads} query heads cannot share {kv_heads} KV heads evenly"
        advice = f"write a multiple of {kv_heads}, such as `{_nearest(heads, kv_heads)} / {kv_heads}`"
        draft.error("ATTN303", draft.fields["heads"].value.span, message, advice)
    else:
        draft.values.update(heads=heads, kv_heads=kv_heads)


def _nearest(number: int, step: int) -> int:
    return max(step, round(number / step) * step)


def head_dim(draft: Draft) -> None:
    pair = _pair(draft, "head_dim", "`D` or `DQK / DV`, such as `128` or `192 / 128`")
    if pair is None:
        return
    for size, place in dict.fromkeys(pair):
        if size % 8 or not 8 <= size <= _LARGEST_HEAD_DIM:
            closest = min(_nearest(size, 8), _LARGEST_HEAD_DIM)
            message = f"a head size of {size} is no multiple of 8 from 8 to {_LARGEST_HEAD_DIM}"
            draft.error("ATTN304", place, message, f"the nearest is {closest}")
            return
    draft.values.update(head_dim_qk=pair[0][0], head_dim_v=pair[1][0])


def lse(draft: Draft) -> None:
    chosen = _choice(draft, "lse", ("true", "false"), default="false")
    if chosen:
        draft.values["lse"] = chosen == "true"


def softmax(draft: Draft) -> None:
    chosen = _choice(draft, "softmax", ("auto", "online"), default="auto")
    if chosen:
        draft.values["softmax"] = chosen


def split(draft: Draft) -> None:
    value = draft.value("split")
    if not isinstance(value, nodes.Call) or value.function.text != "fixed":
        if isinstance(value, nodes.Name) and value.text == "fixed":
            draft.error("ATTN311", value.span, "`fixed` lacks the number of keys", "write `fixed(256)`")
            return
        chosen = _choice(draft, "split", ("auto", "none", "fixed(N)"), default="auto")
        if chosen:
            draft.values["split"] = Split("none" if chosen == "none" else "auto")
        return
    keys = _integer(value.arguments[0].value) if len(value.arguments) == 1 else None
    if keys is None or value.arguments[0].keyword is not None:
        draft.error("ATTN311", value.span, "`fixed` takes one number of keys", "write `fixed(256)`")
    elif keys < _SPLIT_STEP or keys % _SPLIT_STEP:
        message = f"parts of {keys} keys are no multiple of {_SPLIT_STEP}"
        advice = f"the nearest is `fixed({_nearest(keys, _SPLIT_STEP)})`"
        draft.error("ATTN311", value.arguments[0].value.span, message, advice)
    else:
        draft.values["split"] = Split("fixed", keys)


def targets(draft: Draft) -> None:
    value = draft.value("targets")
    if value is None:
        draft.values["targets"] = None
        return
    if not isinstance(value, nodes.List) or not value.items:
        draft.error("ATTN312", value.span, "`targets` takes a list of plan targets", f"write `[{', '.join(TARGETS)}]`")
        return
    seen: dict[str, nodes.Name] = {}
    for item in value.items:
        if not isinstance(item, nodes.Name) or item.text not in TARGETS:
            name = item.text if isinstance(item, nodes.Name) else None
            what = f"there is no target {quote(name)}" if name else "a target is a name"
            advice = (near(name, TARGETS) if name else None) or f"the targets are {one_of(TARGETS)}"
            draft.error("ATTN312", item.span, what, advice)
        elif item.text in seen:
            related = [(seen[item.text].span, "first named here")]
            draft.error("ATTN312", item.span, f"target {quote(item.text)} is named twice", related=related)
        else:
            seen[item.text] = item
    draft.values["targets"] = tuple(seen)


def _integer(value: nodes.Value) -> int | None:
    return value.value if isinstance(value, nodes.Number) and isinstance(value.value, int) else None


def _pair(draft: Draft, field: str, form: str) -> list[tuple[int, Span]] | None:
    """The two numbers of `A / B`, each with its place; `A` alone stands for both."""
    value = draft.value(field)
    if value is None:
        return None
    parts = [value, value]
    if isinstance(value, nodes.Binary) and value.operator.text == "/":
        parts = [value.left, value.right]
    numbers = [number for part in parts if (number := _integer(part)) is not None]
    if len(numbers) < 2:
        draft.error("ATTN301", value.span, f"`{field}` takes whole numbers", f"write {form}")
        return None
    return [(number, part.span) for number, part in zip(numbers, parts, strict=True)]


def _choice(draft: Draft, field: str, allowed: tuple[str, ...], default: str | None = None) -> str | None:
    """The word that a field was set to, or its default."""
    value = draft.value(field)
    if value is None:
        return default if draft.is_missing(field) else None
    if isinstance(value, nodes.Name) and value.text in allowed:
        return value.text
    if isinstance(value, nodes.Name):
        _unknown_word(draft, field, value, allowed)
    else:
        draft.error("ATTN301", value.span, f"`{field}` takes one word", f"one of {one_of(allowed)}")
    return None


def _unknown_word(draft: Draft, field: str, name: nodes.Name, allowed: tuple[str, ...]) -> None:
    advice = near(name.text, allowed)
    listing = f"the values are {one_of(allowed)}"
    message = f"`{field}` cannot be {quote(name.text)}"
    draft.error("ATTN302", name.span, message, f"{advice} {listing}" if advice else listing)


def _kind(
    draft: Draft, field: str, allowed: tuple[str, ...], options: dict[str, str], optional: bool
) -> tuple[str, int | None] | None:
    """A kind such as `single` or `paged(block = 16)`: the word, and the number of its one option."""
    value = draft.value(field)
    if not isinstance(value, nodes.Call):
        chosen = _choice(draft, field, allowed)
        if value is not None and chosen in options and not optional:
            option = options[chosen]
            draft.error("ATTN301", value.span, f"`{chosen}` lacks its `{option}`", f"write `{chosen}({option} = 16)`")
            return None
        return (chosen, None) if chosen else None
    word = value.function.text
    if word not in allowed:
        _unknown_word(draft, field, value.function, allowed)
        return None
    if word not in options:
        draft.error("ATTN301", value.span, f"`{word}` takes no arguments", f"write `{field} = {word}`")
        return None
    option = options[word]
    form = f"write `{word}({option} = 16)`"
    if len(value.arguments) != 1:
        draft.error("ATTN301", value.span, f"`{word}` takes the one argument `{option}`", form)
        return None
    argument = value.arguments[0]
    if argument.keyword is None or argument.keyword.text != option:
        place = argument.keyword.span if argument.keyword else argument.value.span
        draft.error("ATTN301", place, f"the argument of `{word}` is called `{option}`", form)
        return None
    number = _integer(argument.value)
    if number is None or number < 1:
        draft.error("ATTN315", argument.value.span, f"`{option}` is a whole number from 1", form)
        return None
    return word, number
