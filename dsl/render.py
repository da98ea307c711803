"""Render: print a `ModulePlan` through the templates. No decision is made here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import jinja2

from dsl.fit import fit
from dsl.header import header_lines, short_hash
from dsl.plan.module import ModulePlan
from dsl.resources import templates_folder

_LIBRARY = "attn_unnamed"


class RenderError(Exception):
    """A template asks for what the plan does not have. Names the template and the line."""


class _Loader(jinja2.FileSystemLoader):
    """Templates whose control lines are Python comments: `#% if name`.

    Jinja's own line statements would swallow the blank lines that follow them.
    """

    _CONTROL_LINE = re.compile(r"^[ \t]*#% (.*)$", re.MULTILINE)

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        source, filename, uptodate = super().get_source(environment, template)
        return self._CONTROL_LINE.sub(r"{% \1 %}", source), filename, uptodate


@functools.cache
def environment() -> jinja2.Environment:
    """The one Jinja environment. Control lines are comments that begin with `#%`."""
    result = jinja2.Environment(
        loader=_Loader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=jinja2.select_autoescape(enabled_extensions=("svg.jinja",), disabled_extensions=(), default=False),
    )
    result.filters["braces"] = _braces
    result.filters["tuple_text"] = _tuple_text
    result.filters["quoted"] = lambda names: ", ".join(f'"{name}"' for name in names)
    return result


def _braces(entries: Mapping[str, object]) -> str:
    """A dictionary on one line."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in entries.items()) + "}"


def _tuple_text(value: object) -> str:
    """A tuple of numbers, names and tuples, names in double quotes."""
    return repr(value).replace("'", '"')


def render(plan: ModulePlan) -> str:
    """The text of the module. Raises RenderError."""
    body = _print("module.py.jinja", plan=plan, library=_LIBRARY)
    body = fit(body)
    body = body.replace(_LIBRARY, f"attn_{short_hash(body.encode())}")
    name = f"{plan.stem}.attn"
    command = f"python -m dsl build {name}"
    return "\n".join((*header_lines(command, name, short_hash(plan.file.source.data), body), "")) + body


def _print(template: str, **values: object) -> str:
    try:
        return environment().get_template(template).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"{error.name}:{error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        name, line = _place(error)
        raise RenderError(f"{name}:{line}: {error.message}") from error


def _place(error: BaseException) -> tuple[str, int]:
    """The template and line of the innermost template frame."""
    place, trace = ("?", 0), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(".jinja"):
            place = trace.tb_frame.f_code.co_filename.rsplit("templates/")[-1], trace.tb_lineno
        trace = trace.tb_next
    return place
