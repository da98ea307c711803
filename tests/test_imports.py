"""The import direction is drawn here: a module imports from the floors below its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT, SPECS, run_python

FLOORS = (
    ("dsl.source", "dsl.architecture", "dsl.catalogue", "dsl.header", "dsl.resources", "dsl.fit"),
    ("dsl.diagnostics",),
    ("dsl.nodes", "dsl.expr.tree"),
    ("dsl.spec", "dsl.items"),
    ("dsl.expr", "dsl.layout", "dsl.wording"),
    ("dsl.syntax",),
    ("dsl.check",),
    ("dsl.plan", "dsl.printer"),
    ("dsl.render", "dsl.fmt", "dsl.derivation"),
    ("dsl.emit", "dsl.picture"),
    ("dsl.pipeline",),
    ("dsl.load",),
    ("dsl.compile", "dsl.verify"),
    ("dsl.bench", "dsl.explain"),
    ("dsl.cli",),
    ("dsl.__main__",),
)
FLOOR = {home: number for number, floor in enumerate(FLOORS) for home in floor}
LIBRARIES = ("numpy", "torch", "triton")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "dsl").rglob("*.py")
}


def home(module: str) -> str | None:
    """The entry of the plan of floors that a module belongs to."""
    while module and module not in FLOOR:
        module = module.rpartition(".")[0]
    return module or None


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES]
            yield from submodules or [node.module]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"dsl"}))
def test_imports_go_down(module: str):
    own = home(module)
    assert own, f"{module} has no floor: give it one in FLOORS"
    for imported in imports(MODULES[module]):
        other = home(imported)
        if other is not None and other != own:
            assert FLOOR[other] < FLOOR[own], f"{module} ({own}) imports {imported}, which is not below it"


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        module: set(imports(path)) & MODULES.keys() - {module} for module, path in MODULES.items() if module != "dsl"
    }
    TopologicalSorter(graph).prepare()


def test_a_build_needs_neither_torch_nor_triton_nor_numpy(tmp_path: Path):
    program = f"""
import sys
for name in {LIBRARIES}:
    sys.modules[name] = None
import dsl
for spec in {[str(spec) for spec in SPECS]}:
    dsl.build(spec, sys.argv[1])
"""
    run = run_python("-c", program, tmp_path)
    assert run.returncode == 0, run.stderr.decode()
    assert len(list(tmp_path.glob("*.py"))) == len(SPECS)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [("import dsl", "dsl.source click lark jinja2"), ("import dsl.cli.build", "rich lark jinja2")],
)
def test_slow_imports_come_late(statement: str, absent: str):
    run = run_python("-c", f"{statement}, sys\nprint(*(sys.modules.keys() & set({absent.split()})))")
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.split() == []
