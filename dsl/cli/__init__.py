"""The command line, above every stage: one small file a command."""

from __future__ import annotations


def main() -> None:
    from dsl.cli.group import main

    main()
