"""Tests that run in one process of their own: Triton's interpreter is switched on before import or not at all."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable

from tests.conftest import run_python


class Interpreted:
    """The tests of one module. `mark` makes a function one of them; `main` runs them and prints what came of each."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.tests: dict[str, Callable[[], None]] = {}

    @functools.cached_property
    def outcomes(self) -> tuple[dict[str, str | None], str]:
        """What went wrong in each test, and how the process ended."""
        done = run_python("-m", self.module, environment={"TRITON_INTERPRET": "1"})
        found = dict(json.loads(line) for line in done.stdout.decode().splitlines())
        return found, f"the process ended with status {done.returncode} before or in this test\n{done.stderr.decode()}"

    def mark(self, test: Callable[[], None]) -> Callable[[], None]:
        self.tests[test.__name__] = test

        @functools.wraps(test)
        def outcome() -> None:
            found, end = self.outcomes
            problem = found.get(test.__name__, end)
            assert problem is None, problem

        return outcome

    def main(self) -> None:
        from dsl.verify.interpreter import repair

        repair()
        for name, test in self.tests.items():
            try:
                test()
                problem = None
            except Exception:
                problem = traceback.format_exc()
            print(json.dumps([name, problem]), flush=True)
