"""`attnspec doctor`: what this machine has for building, verifying and running kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import click

from dsl import __version__
from dsl.cli.console import json_result, result
from dsl.cli.exits import Exit
from dsl.header import CODEGEN
from dsl.resources import templates_folder

NEEDED_TO_BUILD = ("click", "jinja2", "lark", "rich")
NEEDED_TO_VERIFY = ("numpy", "torch", "triton")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Show what this machine has.

    Exit 1 if something that building or verifying needs is missing.
    """
    versions = {name: _version(name) for name in NEEDED_TO_BUILD + NEEDED_TO_VERIFY}
    facts: dict[str, object] = {
        "attnspec": __version__,
        "codegen": CODEGEN,
        "python": platform.python_version(),
        "templates": templates_folder().is_dir(),
        **versions,
        "gpus": _gpus(),
        "interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "triton_cache": os.environ.get("TRITON_CACHE_DIR") or os.path.join("~", ".triton", "cache"),
    }
    sound = None not in versions.values() and facts["templates"]
    if as_json:
        json_result("doctor", ok=bool(sound), **facts)
    else:
        for name, fact in facts.items():
            result(f"{name:12} {_printed(fact)}")
    context.exit(Exit.YES if sound else Exit.NO)


def _version(name: str) -> str | None:
    """The version of what would be imported; a module without metadata is there all the same."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _printed(fact: object) -> str:
    if isinstance(fact, list):
        return ", ".join(fact) or "none"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return "missing" if fact is None else str(fact)
