"""The command line, above every stage: one small file a command."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    try:
        from dsl.cli.group import main

        main()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        sys.exit(130)
    finally:
        # The answer has been given: an interrupt while Python takes itself down has nothing left to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
