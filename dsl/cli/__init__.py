"""The command line, above every stage: one small file a command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        from dsl.cli.group import main

        main()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        sys.exit(130)
