"""Random specs: valid ones as text for Hypothesis, and broken ones for the fuzzer."""

from __future__ import annotations

import random
import re

from hypothesis import strategies as st

NUMBERS = ("q", "kv", "h", "head", "kv_head", "b", "seq", "q_token", "kv_token", "q_len", "kv_len", "window")
PARAMS = "param slopes[head] : fp32  param window : int32  param flags[kv_head, 3] : bool  param doc[q_token] : int64"

_KINDS = (("single", "paged"), ("packed", "packed"), ("packed", "paged"), ("batched", "batched"))
_CACHES = (
    "[block, slot, kv_head, dim]",
    "[block, kv_head, slot, dim]",
    "[block, kv_head, dim/8, slot, dim%8]",
    "[block, kv_head, slot/8, dim, slot%8]",
)


def integers(depth: int = 2) -> st.SearchStrategy[str]:
    leaves = st.one_of(st.sampled_from(NUMBERS), st.integers(0, 9).map(str), st.just("doc[q_token]"))
    if depth == 0:
        return leaves
    inner = integers(depth - 1)
    return st.one_of(
        leaves,
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(("//", "%")), st.integers(1, 9)),
        st.builds("-{}".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(("min", "max")), inner, inner),
        st.builds("abs({})".format, inner),
    )


def conditions(depth: int = 3) -> st.SearchStrategy[str]:
    leaves = st.sampled_from(("causal", "true", "false", "flags[kv_head, 1]"))
    if depth == 0:
        return leaves
    inner, numbers = conditions(depth - 1), integers(depth - 1)
    signs = st.sampled_from(("<", "<=", ">", ">=", "==", "!="))
    return st.one_of(
        leaves,
        st.builds("({} {} {})".format, inner, st.sampled_from(("and", "or")), inner),
        st.builds("(not {})".format, inner),
        st.builds("{} {} {}".format, numbers, signs, numbers),
        st.builds("{} <= {} < {}".format, numbers, numbers, numbers),
        st.builds("(({}) == ({}))".format, inner, inner),
    )


def scores(depth: int = 3) -> st.SearchStrategy[str]:
    leaves = st.one_of(st.just("score"), st.floats(0, 100, width=32).map(repr), st.just("slopes[h]"), integers(1))
    if depth == 0:
        return leaves
    inner = scores(depth - 1)
    return st.one_of(
        leaves,
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
        st.builds("{} / {}".format, inner, st.integers(1, 9)),
        st.builds("softcap({}, {})".format, inner, st.integers(1, 50)),
        st.builds("where({}, {}, {})".format, conditions(1), inner, inner),
        st.builds("{}(score)".format, st.sampled_from(("exp", "log", "tanh", "sqrt", "abs"))),
        st.just("(score + alibi(h) * (kv - q))"),
    )


@st.composite
def blocks(draw: st.DrawFn, name: str = "layer") -> str:
    """An attention block with any of its fields."""
    query, kv = draw(st.sampled_from(_KINDS))
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(("bf16", "fp16", "fp32")))
    lines = [
        f"query = {query}" + (draw(st.sampled_from(("", "(max = 8)"))) if query == "packed" else ""),
        f"kv = paged(block = {8 * draw(st.integers(1, 8))})" if kv == "paged" else f"kv = {kv}",
        f"dtype = {dtype}",
        f"heads = {kv_heads * group} / {kv_heads}",
        f"head_dim = {8 * draw(st.integers(8, 72))} / {8 * draw(st.integers(1, 8))}",
        PARAMS,
    ]
    quantised = "fp8_e4m3", "int8", "fp8_e5m2 per [kv_head]", "fp8_e4m3fnuz per [seq, kv_head]", dtype
    options = {
        "kv_dtype": st.sampled_from(quantised),
        "mask": conditions(),
        "score": scores(),
        "sink": st.sampled_from(("slopes[h]", "0", "-1.5 * slopes[h] + 2")),
        "scale": st.sampled_from(("window", "0.5", "1 / sqrt(80)", "1e-3", "-2")),
        "lse": st.sampled_from(("true", "false")),
        "split": st.sampled_from(("auto", "none", "fixed(64)", "fixed(448)")),
        "softmax": st.sampled_from(("auto", "online")),
        "targets": st.sampled_from(("[portable]", "[hopper, portable]")),
    }
    if kv == "paged":
        options |= {"k_cache": st.sampled_from(_CACHES), "v_cache": st.sampled_from((*_CACHES, "k_cache"))}
    for field in draw(st.sets(st.sampled_from(sorted(options)))):
        lines.append(f"{field} = {draw(options[field])}")
    return f"attention {name} {{\n    " + "\n    ".join(draw(st.permutations(lines))) + "\n}\n"


@st.composite
def spec_texts(draw: st.DrawFn) -> str:
    """A valid file of two blocks, a dispatch of them and a workload. A constant of it may have no value."""
    text = draw(blocks()) + "attention other from layer { dtype = fp16  kv_dtype = fp16 }\n"
    if "dtype = bf16" in text and "kv_dtype = bf16" not in text and " per " not in text and "8_e" not in text:
        text += "dispatch both = [layer, other]\n" if "int8" not in text else ""
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    q_len = "" if "query = single" in text else "q_len = [3, 5]  "
    return text + f"workload layer {{ {q_len}kv_len = [{lengths}, 7] }}\n"


WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_NOISE = WORDS.findall(
    "attention dispatch workload from param and or not per {}()[]=,:+-*/%<>!&$;'.\\# \" \u00a0 \x00 \t \n é"
    " q kv score causal softcap lse heads dim 32 8x 99999999999 1_0"
)


def mutated(text: str, chance: random.Random) -> str:
    """The text after a few random edits of its words."""
    words = WORDS.findall(text)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(words) + 1)
        edit = chance.randrange(4)
        if edit == 0:
            del words[place : place + chance.randint(1, 4)]
        elif edit == 1:
            words.insert(place, chance.choice(_NOISE))
        elif edit == 2 and words:
            words[place % len(words)] = chance.choice(_NOISE)
        elif words:
            words.insert(place, chance.choice(words))
    return "".join(words)


def noise(chance: random.Random) -> str:
    """Random words, or random characters."""
    if chance.random() < 0.5:
        return " ".join(chance.choice(_NOISE) for _ in range(chance.randrange(80)))
    return "".join(chr(chance.choice((chance.randrange(128), chance.randrange(0xD800)))) for _ in range(80))


@st.composite
def buildable_specs(draw: st.DrawFn, small: bool = False) -> str:
    """A file that every stage takes: one or two blocks, whatever of a dispatch and a workload they can have."""
    decode = draw(st.booleans())
    kv_heads, group = draw(st.integers(1, 2 if small else 8)), draw(st.integers(1, 3 if small else 8))
    dims = st.integers(1, 8 if small else 32).map(lambda eights: 8 * eights)
    dtypes = draw(st.permutations(("bf16", "fp16", "fp32")))
    lines = [
        f"dtype = {dtypes[0]}",
        f"heads = {kv_heads * group} / {kv_heads}",
        f"head_dim = {draw(dims)} / {draw(dims)}",
        f"lse = {draw(st.sampled_from(('true', 'false')))}",
        f"softmax = {draw(st.sampled_from(('auto', 'online')))}",
        f"scale = {draw(st.sampled_from(('0.125', '1 / sqrt(80)', '1e-3', '-0.5')))}",
    ]
    if decode:
        block = 8 * draw(st.integers(1, 8))
        lines += ["query = single", f"kv = paged(block = {block})"]
        lines += [f"k_cache = {draw(st.sampled_from(_CACHES[:3]))}", f"v_cache = {draw(st.sampled_from(_CACHES))}"]
        lines += [f"split = {draw(st.sampled_from(('auto', 'none', 'fixed(64)', 'fixed(448)')))}"]
    else:
        lines += ["query = packed", "kv = packed"]
    text = f"attention layer {{ {'  '.join(draw(st.permutations(lines)))} }}\n"
    if draw(st.booleans()):
        text += f"attention other from layer {{ dtype = {dtypes[1]} }}\ndispatch both = [layer, other]\n"
    q_len = "" if decode else f"q_len = {draw(st.integers(0, 40))}  "
    return text + f"workload layer {{ seqs = {draw(st.integers(1, 3))}  {q_len}kv_len = {draw(st.integers(0, 90))} }}\n"
