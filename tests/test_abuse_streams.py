"""Standard streams that are closed, full or broken, and answers in JSON whatever goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsl.cli.exits import Exit
from dsl.cli.group import COMMANDS, asks_for_json, group
from tests.conftest import DECODE, ROOT

COMMAND_LINES = (
    ("check", "good.attn"),
    ("check", "wrong.attn"),
    ("check", "--json", "good.attn"),
    ("check", "--json", "missing.attn"),
    ("check", "-"),
    ("build", "good.attn", "-o", "."),
    ("build", "--json", "good.attn", "wrong.attn", "-o", "."),
    ("build", "--diff", "good.attn"),
    ("build", "--json"),
    ("fmt", "good.attn"),
    ("fmt", "-"),
    ("explain", "good.attn"),
    ("explain", "ATTN101"),
    ("--help",),
    ("--version",),
    ("nonsense", "--json"),
)
CLOSINGS = (
    "<&-",
    ">&-",
    "2>&-",
    "<&- >&-",
    ">&- 2>&-",
    "<&- >&- 2>&-",
    "> /dev/full",
    "2> /dev/full",
    "> /dev/full 2>&1",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.attn").write_text(DECODE)
    (tmp_path / "wrong.attn").write_text(DECODE.replace("64", "65"))
    return tmp_path


@pytest.mark.parametrize("closing", CLOSINGS)
def test_no_stream_is_missed(closing: str, folder: Path) -> None:
    """Whichever are closed or full: no traceback, no fault of the tool, and an exit status that is no lie."""
    if "/dev/full" in closing and not os.path.exists("/dev/full"):
        pytest.skip("not run: no full device here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in COMMAND_LINES:
        line = f'exec "$@" {closing}'
        command = ["sh", "-c", line, "sh", sys.executable, "-m", "dsl", *arguments]
        run = subprocess.run(command, env=environment, input=DECODE.encode(), capture_output=True)
        said = run.stdout + run.stderr
        assert b"Traceback" not in said and b"fault of attnspec" not in said, (arguments, said)
        assert run.returncode in (Exit.YES, Exit.NO, Exit.COULD_NOT_ASK), (arguments, said)
        silent = arguments in (("check", "good.attn"), ("check", "-"))
        if (">&-" in closing.split() or closing.startswith("> ")) and not silent:
            assert run.returncode == Exit.COULD_NOT_ASK, (arguments, said)
        if closing == ">&-" and arguments == ("check", "--json", "good.attn"):
            assert run.stderr == b"error: stdout: is closed\n"


def test_a_file_never_takes_the_number_of_a_closed_stream(folder: Path) -> None:
    """Else what a library prints would land in the module."""
    program = (
        "import os, sys; from dsl.cli.streams import prepare; prepare(); file = open('opened', 'w')\n"
        "os.write(1, b'noise'); os.write(2, b'noise'); assert file.fileno() > 2"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0 and (folder / "opened").read_bytes() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        *((command, "--json") for command in COMMANDS if command not in ("doctor", "fmt", "explain")),
        ("build", "--json", "--target", "abacus", "good.attn"),
        ("build", "--json", "-", "good.attn"),
        ("check", "--json", "-", "-"),
        ("check", "--format", "json"),
        ("check", "--format=json", "--nonsense"),
        ("nonsense", "--json"),
        ("--json",),
    ],
)
def test_a_question_that_cannot_be_asked_is_answered_in_json(arguments: tuple[str, ...], folder: Path) -> None:
    run = CliRunner().invoke(group, arguments)
    assert (run.exit_code, run.stderr) == (Exit.COULD_NOT_ASK, "")
    answer = json.loads(run.stdout)
    assert set(answer) == {"schema", "error"} and answer["schema"] == "attnspec.error/1" and answer["error"]


@pytest.mark.parametrize(
    ("trouble", "status"),
    [(ZeroDivisionError("oh"), Exit.COULD_NOT_ASK), (MemoryError(), Exit.COULD_NOT_ASK), (KeyboardInterrupt(), 130)],
)
def test_whatever_ends_a_run_is_answered_in_json(
    trouble: BaseException, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise trouble

    monkeypatch.setattr("dsl.cli.build.generate", fail)
    run = CliRunner().invoke(group, ["build", "--json", "good.attn"])
    assert (run.exit_code, run.stderr) == (status, "")
    assert json.loads(run.stdout)["schema"] == "attnspec.error/1"
    plain = CliRunner().invoke(group, ["build", "good.attn"])
    assert (plain.exit_code, plain.stdout) == (status, "") and plain.stderr.count("error: ") == 1


def test_what_follows_two_dashes_asks_for_nothing() -> None:
    assert asks_for_json(["check", "--json"]) and asks_for_json(["check", "--format", "json", "x"])
    assert not asks_for_json(["check", "--", "--json"]) and not asks_for_json(["check", "json", "--format"])
