"""A compiler of attention: a `.attn` spec goes in, a readable Triton module comes out.

The road, in order; each stage takes what the one before it returned:

1. `Source.read(path)` reads the text, and remembers where everything stands.
2. `load_spec(source)` parses and checks it; what is wrong is raised as one `SpecError` with every finding.
3. `plan_module(spec_file)` decides how each kernel computes: tiles, warps, splits.
4. `render(plan)`, in `dsl.render`, prints the plan through the templates.
5. `emit(text, path)`, in `dsl.emit`, writes the file. `build(path)` is steps 1 to 5 in one call.
6. `load(path)` imports the generated file.
7. `verify(paths)` compares its functions with a dense reference in float64.

    import dsl

    path = dsl.build("specs/decode.attn")
    decode = dsl.load(path)
    out = decode.paged_attention_decode(query, k_cache, v_cache, block_tables, seq_lens)

The stages are imported when they are asked for; up to step 5 neither torch nor triton is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Both names are also a submodule's; imported here once, the functions keep them.
from dsl.load import load
from dsl.verify import verify

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dsl.check import load_spec
    from dsl.diagnostics import SpecError
    from dsl.pipeline import build
    from dsl.plan import plan_module
    from dsl.source import Source

__all__ = ["Source", "SpecError", "build", "load", "load_spec", "plan_module", "verify"]

_HOMES = {
    "Source": "dsl.source",
    "SpecError": "dsl.diagnostics",
    "load_spec": "dsl.check",
    "plan_module": "dsl.plan",
    "build": "dsl.pipeline",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
