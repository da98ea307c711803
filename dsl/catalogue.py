"""The catalogue: what each code of a finding means, for `explain CODE` and for the reference.

A code is never used for something else again. 1xx are about syntax, 2xx about names and the shape of a file, 3xx about
the values of fields, 4xx about expressions, 5xx about what the plan cannot do.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A title of a few words, and a paragraph or two for somebody who wants to know more."""

    title: str
    explanation: str


CATALOGUE: dict[str, Entry] = {
    "ATTN101": Entry(
        "the file is not UTF-8",
        "Specs are UTF-8 text, with or without a byte-order mark. Save the file in that encoding.",
    ),
    "ATTN102": Entry(
        "a character that means nothing",
        "Outside of comments a spec is written in ASCII: names, numbers, brackets and a few signs. Quotes,\n"
        "semicolons and the signs `&`, `|`, `!` have no meaning; the operators on conditions are `and`, `or`,\n"
        "`not`.",
    ),
    "ATTN103": Entry(
        "a malformed number",
        "A number is digits, perhaps a point with digits on both sides, perhaps an exponent: `30`, `0.5`,\n"
        "`1e-6`. No letter, point or underscore may touch it.",
    ),
    "ATTN104": Entry(
        "something else was expected here",
        "The text up to the mark is fine and cannot go on like this. Outside brackets, `name =` starts the\n"
        "next field, whether or not a line ends.",
    ),
    "ATTN105": Entry(
        "an unfinished field, param or block head",
        "The text ends, or the next field begins, before this one is complete. Newlines mean nothing, so what\n"
        "is missing is missing where the mark stands, not on the next line. `==` compares; `=` sets a field.",
    ),
    "ATTN106": Entry(
        "a block without its closing brace",
        "A block of fields ends with `}`. The mark shows where the next block begins or where the file ends.",
    ),
    "ATTN107": Entry(
        "something that stands outside of its block",
        "A file is a row of `attention`, `dispatch` and `workload` blocks. Fields stand in the braces of an\n"
        "attention or workload block, params in those of an attention block, and nothing stands between the\n"
        "blocks.",
    ),
    "ATTN108": Entry(
        "an expression that is nested too deep",
        "Brackets, minus signs and `not` may stand inside one another 100 deep, and an expression may have\n"
        "200 operators on the way from its outside to any name in it. Pass a tensor param instead of a long\n"
        "formula.",
    ),
    "ATTN109": Entry(
        "a number that is too large",
        "Integers end at 2147483647 (2^31 - 1) and floats at the largest of single precision, 3.4028235e+38.",
    ),
    "ATTN110": Entry(
        "a file that is too long",
        "A spec has at most 20,000 words and signs, comments not counted, and at most 1 MiB (1,048,576 bytes) in\n"
        "all. Split it into several files.",
    ),
    "ATTN111": Entry(
        "too many mistakes",
        "The first 100 mistakes of a file are reported. What comes after them is not, and may be wrong as well.",
    ),
    "ATTN201": Entry(
        "a file without an attention block",
        "A file becomes a module of functions, one for each `attention` and `dispatch` block, so it needs one\n"
        "at least:\n\n"
        "    attention name {\n"
        "        query    = packed\n"
        "        kv       = packed\n"
        "        dtype    = bf16\n"
        "        heads    = 32 / 8\n"
        "        head_dim = 128\n"
        "    }",
    ),
    "ATTN202": Entry(
        "a name that cannot be used",
        "Names become names of Python functions and arguments. They are ASCII letters, digits and\n"
        "underscores, at most 64 of them, start with a letter, and are no keyword of Python.",
    ),
    "ATTN203": Entry(
        "an unknown field",
        "There is no field of that name. The fields of an attention block are query, kv, dtype, kv_dtype,\n"
        "heads, head_dim, q, k, v, out, k_cache, v_cache, mask, score, sink, scale, lse, split, softmax and\n"
        "targets; those of a workload are seqs, q_len and kv_len.",
    ),
    "ATTN204": Entry(
        "a field or param that is set twice",
        "Each field and each param is set at most once in a block. A block made `from` another one may set\n"
        "the fields of its base anew.",
    ),
    "ATTN205": Entry(
        "a missing field",
        "An attention block needs query, kv, dtype, heads and head_dim, its own or inherited. A workload\n"
        "needs kv_len where the query is single, and q_len otherwise.",
    ),
    "ATTN206": Entry(
        "a name that is taken",
        "Attention and dispatch blocks become functions of one module, so no two have one name; and an\n"
        "attention block has at most one workload.",
    ),
    "ATTN207": Entry(
        "a block that does not exist",
        "`from`, `dispatch` and `workload` name attention blocks of the same file.",
    ),
    "ATTN208": Entry(
        "a base that comes too late",
        "`attention derived from base` takes over the fields and params of a block that comes earlier in the\nfile.",
    ),
    "ATTN209": Entry(
        "a name that the generated module needs",
        "The module uses this name for a library, a helper, or a part of one of its functions. Choose another\none.",
    ),
    "ATTN210": Entry(
        "a param whose name has a meaning",
        "A param is a name in expressions and an argument of the launcher, so it cannot be called like a name\n"
        "or function of expressions (`q`, `score`, `exp`, ...) or like another argument (`out`, `workspace`,\n"
        "...).",
    ),
    "ATTN211": Entry(
        "blocks of a dispatch that are not called alike",
        "The blocks of a dispatch answer one call, so they agree in the kinds of query and kv, in layouts,\n"
        "params, the axes of scales, and `lse`.",
    ),
    "ATTN212": Entry(
        "blocks of a dispatch that cannot be told apart",
        "A dispatch chooses by dtype, kv_dtype, heads, head_dim and block size. No two of its blocks have all\n"
        "of them equal.",
    ),
    "ATTN213": Entry(
        "a malformed list of blocks",
        "A dispatch lists at least one attention block, each by its name and each once.",
    ),
    "ATTN214": Entry(
        "kinds of query and kv that do not go together",
        "single goes with paged (decode), packed with packed (prefill of packed sequences) or with paged\n"
        "(chunked prefill, mixed batches), batched with batched (dense tensors).",
    ),
    "ATTN215": Entry(
        "too many params",
        "A block has at most 64 params, those of its base included. A tensor param holds many numbers.",
    ),
    "ATTN301": Entry(
        "a value of the wrong kind",
        "The field takes another kind of value: a word, a number, a list. The help shows the form.",
    ),
    "ATTN302": Entry(
        "a word that is none of the field's values",
        "The field takes one of a few words, and this is none of them. The help lists them.",
    ),
    "ATTN303": Entry(
        "head counts that do not go together",
        "`heads = H / KV` means that each of the KV heads serves H / KV query heads, so H is a multiple of KV\n"
        "and both are at least 1.",
    ),
    "ATTN304": Entry(
        "a head size that cannot be used",
        "Head sizes are multiples of 8 from 8 to 576. `head_dim = DQK / DV` gives V and the output another\n"
        "size than queries and keys.",
    ),
    "ATTN305": Entry(
        "a kv_dtype that does not fit",
        "Keys and values have the query's dtype, or one of the quantised types fp8_e4m3, fp8_e4m3fnuz,\n"
        "fp8_e5m2 and int8. Quantised ones have scales: one for K and one for V, or tensors of the axes after\n"
        "`per`, which are [kv_head], [seq, kv_head] or, for a paged cache, [block, slot, kv_head].",
    ),
    "ATTN306": Entry(
        "a layout of a tensor that does not exist",
        "Paged caches are called k_cache and v_cache, other keys and values k and v; every kind has q and\nout.",
    ),
    "ATTN307": Entry(
        "wrong axes in a layout",
        "A layout names each axis of the tensor once, slowest first. A cache has the axes block, slot,\n"
        "kv_head and dim, where kv_head may be left out if there is one KV head.",
    ),
    "ATTN308": Entry(
        "an axis that is split wrongly",
        "`dim` or `slot` of a cache may be split into an outer and an inner part, `dim/8` and `dim%8`: both\n"
        "parts, the same number, and one that divides the axis.",
    ),
    "ATTN309": Entry(
        "a last axis that cannot be contiguous",
        "The last axis of a layout is the contiguous one: an unsplit axis, or the inner part of a split one.",
    ),
    "ATTN310": Entry(
        "a V that does not fit into K's rows",
        "`v_cache = k_cache` means that V is the first DV elements of K's rows, so `head_dim = DQK / DV` has\n"
        "DV <= DQK.",
    ),
    "ATTN311": Entry(
        "a split that cannot be done",
        "`split = fixed(N)` cuts each sequence into parts of N keys, where N is a multiple of 64.",
    ),
    "ATTN312": Entry(
        "wrong plan targets",
        "`targets` lists the ways in which kernels may be written, each once: portable, hopper.",
    ),
    "ATTN313": Entry(
        "a param of a wrong type or with wrong axes",
        "`param name : type` declares a number, `param name[axes] : type` a tensor. Types are int32, int64,\n"
        "bool, bf16, fp16 and fp32; axes are head, kv_head, seq, q_token, kv_token and whole numbers.",
    ),
    "ATTN314": Entry(
        "wrong shapes in a workload",
        "seqs, q_len and kv_len are each one number or a list of cases. Lists have equal length. In a list of\n"
        "lengths an inner list gives each sequence its own: `kv_len = [128, [1, 2, 3]]` is a case of one\n"
        "sequence and one of three.",
    ),
    "ATTN315": Entry(
        "an option that is no positive number",
        "`paged(block = N)` and `packed(max = N)` take a whole number from 1.",
    ),
    "ATTN401": Entry(
        "an unknown name in an expression",
        "Expressions know q, kv, h, kv_head, b, q_token, kv_token, q_len, kv_len, score, causal, true, false,\n"
        "and the block's params.",
    ),
    "ATTN402": Entry(
        "a name that may not be used in this field",
        "A mask decides which keys are seen, before there is a score, so it cannot use `score`. A sink\n"
        "belongs to a row, not to a key: it may use h, b and params. A scale is a constant or a param.",
    ),
    "ATTN403": Entry(
        "types that do not go together",
        "Expressions are made of integers, floats and conditions. Arithmetic takes numbers, `//` and `%` take\n"
        "integers, `and`, `or`, `not` take conditions. Integers become floats where they meet one; nothing\n"
        "else is converted.",
    ),
    "ATTN404": Entry(
        "an expression of the wrong type",
        "A mask is a condition; score and sink are numbers; a scale is a constant, or a param that is a\nnumber.",
    ),
    "ATTN405": Entry(
        "an unknown function",
        "The functions are softcap, alibi, min, max, abs, exp, log, tanh, sqrt and where. Tensors are indexed\n"
        "with square brackets.",
    ),
    "ATTN406": Entry(
        "wrong arguments of a function",
        "softcap(x, cap) takes a cap above 0, alibi(h) the query head, min and max two or more numbers,\n"
        "where(condition, a, b) two branches of one type, and abs, exp, log, tanh and sqrt one number.",
    ),
    "ATTN407": Entry(
        "a param that is indexed wrongly",
        "A tensor param is used with one index for each of its axes: `sinks[h]`. A param that is a number is\n"
        "used by its name alone.",
    ),
    "ATTN408": Entry(
        "a constant without a value",
        "This part of the expression is a constant that divides by zero, does not fit into 32 bits, or lies\n"
        "outside of what the function is defined for.",
    ),
    "ATTN409": Entry(
        "something that is no expression",
        "Lists and `per` have no meaning in an expression.",
    ),
    "ATTN410": Entry(
        "an expression that is too large",
        "An expression has at most 4,096 parts. Pass a tensor param instead of a long formula.",
    ),
    "ATTN501": Entry(
        "a kind of query and kv that no kernel runs yet",
        "Kernels exist for `query = single` over `kv = paged(...)` (decode), for `query = packed` with\n"
        "`kv = packed` (prefill of packed sequences), and for `query = packed` over `kv = paged(...)` (chunked\n"
        "prefill, speculative decode). `batched` queries are checked and can be computed by nobody yet.",
    ),
    "ATTN506": Entry(
        "a kv_dtype that no kernel reads yet",
        "Keys and values are read in the query's dtype. Quantised caches, and keys and values of another\n"
        "float type than the query, are not planned yet.",
    ),
    "ATTN507": Entry(
        "values inside the rows of keys, which no kernel reads yet",
        "`v_cache = k_cache` makes the first DV elements of a key its value. Until that is planned, pass two\n"
        "caches; they may be views of one buffer.",
    ),
    "ATTN508": Entry(
        "a split that the family's kernel cannot do",
        "`split = fixed(N)` cuts the keys of a sequence into parts of N. The kernel of packed queries computes\n"
        "each query row in one go, so it takes `auto` and `none` only, and its bits never depend on the batch.",
    ),
    "ATTN509": Entry(
        "a layout that no kernel reads yet",
        "Queries, outputs and packed keys and values have `dim` as their last axis. Paged caches may lie in\n"
        "any order of axes.",
    ),
    "ATTN511": Entry(
        "a plan target that does not do this attention",
        "`targets` of a block, and the targets asked for when a module is built, limit the ways in which its\n"
        "kernels may be written. `portable` is always among them: it runs on the GPUs, and for the tensors,\n"
        "that the others leave. Leave the field out to allow all.",
    ),
}
