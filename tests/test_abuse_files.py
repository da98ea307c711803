"""Where a module is written: many writers at once, folders that refuse, full disks, processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsl.cli.exits import Exit
from dsl.emit import compare, emit, replace_file
from dsl.header import is_edited, is_generated
from dsl.pipeline import build, generate
from dsl.source import Source
from tests.conftest import DECODE, ROOT, run_attnspec

NOBODY = 65534
WRITERS = 16
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="not run: only root can become somebody else"
)


# Python itself may stand where only root may look, so everything is imported before root is left.
AS_NOBODY = f"""
import importlib, os, sys
from dsl.cli import main
from dsl.cli.group import COMMANDS
from dsl.explain import explain
from dsl.fmt import format_source
from dsl.pipeline import generate
from dsl.source import Source
for command in COMMANDS:
    importlib.import_module(f"dsl.cli.{{command}}")
generate(Source.from_text(sys.argv.pop(1)))
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
main()
"""


def spec_text(heads: int) -> str:
    return DECODE.replace("8 / 2", f"{2 * heads} / {heads}")


def whole(path: Path, *texts: str) -> bool:
    return path.read_text(encoding="utf-8") in texts


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".py" and path.name != "__pycache__"]


def build_as_nobody(folder: Path, *arguments: str, home: str = "/nonexistent") -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a user who owns nothing, has no home and may write nowhere of his own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", AS_NOBODY, DECODE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may enter; pytest's own are closed to others."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "good.attn").write_text(DECODE)
        (folder / "good.attn").chmod(0o666)
        yield folder


# many at once


def _build_often(folder: str, number: int, rounds: int) -> None:
    """A spec of one's own and, in turns, two texts of one that everybody builds."""
    sys.setswitchinterval(1e-5)
    for turn in range(rounds):
        for name, heads in ((f"own{number}", number + 1), ("shared", 1 + turn % 2)):
            spec = Path(folder, f"specs{number}", f"{name}.attn")
            spec.write_text(spec_text(heads))
            build(spec, Path(folder, "generated"))


def _check_folder(tmp_path: Path) -> None:
    generated = tmp_path / "generated"
    assert leftovers(generated) == []
    assert len(list(generated.iterdir())) == WRITERS + 1
    for number in range(WRITERS):
        source = Source.from_text(spec_text(number + 1), f"own{number}.attn")
        assert whole(generated / f"own{number}.py", generate(source))
    both = [generate(Source.from_text(spec_text(heads), "shared.attn")) for heads in (1, 2)]
    assert whole(generated / "shared.py", *both)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_sixteen_build_into_one_folder(kind: str, tmp_path: Path) -> None:
    """Nobody fails, and a reader who looks all the time sees a whole module each time."""
    for number in range(WRITERS):
        (tmp_path / f"specs{number}").mkdir()
    seen, done = [0], threading.Event()

    def look() -> None:
        path = tmp_path / "generated" / "shared.py"
        while not done.is_set():
            if path.exists():
                text = path.read_text(encoding="utf-8")
                assert is_generated(text) and not is_edited(text)
                seen[0] += 1
            time.sleep(0.001)

    with ThreadPoolExecutor(WRITERS + 1) as pool:
        reader = pool.submit(look)
        try:
            if kind == "threads":
                for future in [pool.submit(_build_often, str(tmp_path), number, 4) for number in range(WRITERS)]:
                    future.result()
            else:
                spawn = multiprocessing.get_context("spawn")
                workers = [spawn.Process(target=_build_often, args=(str(tmp_path), n, 4)) for n in range(WRITERS)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                assert [worker.exitcode for worker in workers] == [0] * WRITERS
        finally:
            done.set()
            sys.setswitchinterval(0.005)
        reader.result()
    assert seen[0] > 0
    _check_folder(tmp_path)


# killed in the middle

# A process that was started in the background of a shell ignores SIGINT, and so would its children.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
LOOP = f"""
{LISTEN}
import sys
from pathlib import Path
from dsl.emit import emit
one, other = (Path(name).read_text(encoding="utf-8") for name in sys.argv[2:])
print("ready", flush=True)
while True:
    emit(one, sys.argv[1])
    emit(other, sys.argv[1])
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_writer_that_is_stopped_leaves_a_whole_file(kind: signal.Signals, tmp_path: Path) -> None:
    """At random moments of writing without a pause; whatever a kill leaves, a later run clears away."""
    texts = [generate(Source.from_text(spec_text(heads), "shared.attn")) for heads in (1, 2)]
    names = [tmp_path / "one.txt", tmp_path / "other.txt"]
    for name, text in zip(names, texts, strict=True):
        name.write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    chance = random.Random(kind)
    for _ in range(12):
        command = [sys.executable, "-c", LOOP, str(out / "shared.py"), *map(str, names)]
        writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0, 0.05))
        writer.send_signal(kind)
        writer.wait(timeout=60)
        writer.stdout.close()
        if (out / "shared.py").exists():
            assert whole(out / "shared.py", *texts)
    if kind == signal.SIGINT:
        assert leftovers(out) == []
    for left in leftovers(out):
        assert left.startswith(".attnspec-")
        os.utime(out / left, (0, 0))
    (out / "shared.py").unlink(missing_ok=True)
    emit(texts[0], out / "shared.py")
    assert os.listdir(out) == ["shared.py"]


def test_what_is_young_or_not_ours_is_left_alone(tmp_path: Path) -> None:
    for name, age in ((".attnspec-0123456789abcdef", 7200), (".attnspec-fedcba9876543210", 60), (".other", 7200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    replace_file(tmp_path / "x.py", "x = 1\n")
    assert sorted(os.listdir(tmp_path)) == [".attnspec-fedcba9876543210", ".other", "x.py"]


def test_an_interrupt_is_one_line_at_any_moment(tmp_path: Path) -> None:
    """From the first line of our own code on; before that Python itself is starting."""
    (tmp_path / "good.attn").write_text(DECODE)
    emit(generate(Source.from_text(DECODE, "good.attn")), tmp_path / "good.py")
    program = f"""
{LISTEN}
import os, signal, sys, threading, time
from dsl.cli import main
seconds = float(sys.argv.pop())
def interrupt():
    while "dsl.cli.group" not in sys.modules:  # what main imports first
        pass
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
sys.argv[1:] = ["build", "good.attn", "-o", ".", "--force"]
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    statuses = []
    for step in range(16):
        command = [sys.executable, "-c", program, str(step * 0.03)]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        statuses.append(run.returncode)
        assert b"Traceback" not in run.stderr, run.stderr.decode()
        if run.returncode == Exit.INTERRUPTED:
            assert run.stderr.endswith(b"interrupted\n") and run.stderr.count(b"\n") == 1, run.stderr
        else:
            assert run.returncode == Exit.YES, run.stderr
        assert sorted(os.listdir(tmp_path)) == ["good.attn", "good.py"]
    assert Exit.INTERRUPTED in statuses


# folders that refuse


@as_root
def test_a_folder_that_is_read_only(open_folder: Path) -> None:
    out = open_folder / "out"
    out.mkdir(mode=0o755)
    refused = build_as_nobody(open_folder, "build", "good.attn", "-o", "out")
    assert (refused.returncode, refused.stdout) == (Exit.COULD_NOT_ASK, b"")
    assert refused.stderr == b"error: out/good.py: permission denied\n"
    assert os.listdir(out) == []
    build(open_folder / "good.attn", out)
    before = (out / "good.py").read_bytes()
    (open_folder / "good.attn").write_text(spec_text(3))
    for options in (("build", "-o", "out"), ("build", "-o", "out", "--force")):
        refused = build_as_nobody(open_folder, *options, "good.attn")
        assert refused.returncode == Exit.COULD_NOT_ASK and b"permission denied" in refused.stderr
    assert (out / "good.py").read_bytes() == before and os.listdir(out) == ["good.py"]
    assert build_as_nobody(open_folder, "build", "-o", "out", "--check", "good.attn").returncode == Exit.NO


@as_root
def test_a_module_or_spec_that_may_not_be_read(open_folder: Path) -> None:
    path = build(open_folder / "good.attn", open_folder)
    path.chmod(0o600)
    refused = build_as_nobody(open_folder, "build", "good.attn", "-o", ".")
    assert refused.returncode == Exit.COULD_NOT_ASK and refused.stderr == b"error: good.py: permission denied\n"
    (open_folder / "good.attn").chmod(0o600)
    for command in ("check", "build", "fmt", "explain", "verify"):
        refused = build_as_nobody(open_folder, command, "good.attn")
        assert refused.returncode == Exit.COULD_NOT_ASK and refused.stderr == b"error: good.attn: permission denied\n"


@as_root
def test_bytecode_that_cannot_be_removed_stops_the_change(open_folder: Path) -> None:
    """Else Python might go on with the old code under the new file's name."""
    out = open_folder / "out"
    out.mkdir()
    out.chmod(0o777)
    path = build(open_folder / "good.attn", out)
    before = path.read_bytes()
    cache = out / "__pycache__"
    cache.mkdir(mode=0o755)
    (cache / "good.cpython-311.pyc").touch()
    (open_folder / "good.attn").write_text(spec_text(3))
    refused = build_as_nobody(open_folder, "build", "good.attn", "-o", "out")
    assert refused.returncode == Exit.COULD_NOT_ASK and b"good.cpython-311.pyc: permission denied" in refused.stderr
    assert path.read_bytes() == before and sorted(os.listdir(out)) == ["__pycache__", "good.py"]


@as_root
@pytest.mark.parametrize("home", ["/nonexistent", "/", ""])
def test_a_home_that_takes_nothing_is_no_obstacle(home: str, open_folder: Path) -> None:
    built = build_as_nobody(open_folder, "build", "good.attn", "-o", "out", home=home)
    assert (built.returncode, built.stderr) == (Exit.YES, b"")
    for command in (("check", "good.attn"), ("explain", "good.attn"), ("fmt", "good.attn"), ("build", "good.attn")):
        assert build_as_nobody(open_folder, *command, home=home).returncode == Exit.YES


@as_root
@pytest.mark.slow
def test_verify_needs_no_home(open_folder: Path) -> None:
    reach = subprocess.run([sys.executable, "-c", "import dsl"], cwd=ROOT, user=NOBODY, group=NOBODY, extra_groups=[])
    if reach.returncode != 0:
        pytest.skip("not run: Python stands where only root may look")
    (open_folder / "tiny.attn").write_text(DECODE + "workload small { seqs = 1  kv_len = 16 }")
    command = [sys.executable, "-m", "dsl", "verify", "tiny.attn", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"}
    verified = subprocess.run(
        command, cwd=open_folder, env=environment, capture_output=True, user=NOBODY, group=NOBODY, extra_groups=[]
    )
    assert verified.returncode == Exit.YES, verified.stderr.decode()


def test_what_is_no_file_is_refused_and_not_read(tmp_path: Path) -> None:
    """A pipe has no end to wait for, and a device no end at all."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    (tmp_path / "folder.py").mkdir()
    for name in ("pipe", "zero", "folder"):
        (tmp_path / f"{name}.attn").write_text(DECODE)
        for options in ((), ("--check",), ("--force",)):
            run = run_attnspec("build", f"{name}.attn", "-o", ".", *options, cwd=tmp_path)
            assert run.returncode == Exit.COULD_NOT_ASK, run.stdout
            assert run.stderr in (
                f"error: {name}.py: is not a regular file\n".encode(),
                f"error: {name}.py: is a directory\n".encode(),
            )
    assert stat.S_ISFIFO((tmp_path / "pipe.py").stat().st_mode)


# disks that are full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("not run: no disk can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@as_root
@pytest.mark.parametrize("free", [0, 1, 3])
def test_a_full_disk_keeps_the_old_module(free: int, small_disk: Path, tmp_path: Path) -> None:
    """However many pages of the new module still fit."""
    (tmp_path / "good.attn").write_text(DECODE)
    path = build(tmp_path / "good.attn", small_disk)
    before = path.read_bytes()
    with pytest.raises(OSError), open(small_disk / "ballast.txt", "wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
    os.truncate(small_disk / "ballast.txt", (small_disk / "ballast.txt").stat().st_size - free * 4096)
    (tmp_path / "good.attn").write_text(spec_text(3))
    run = run_attnspec("build", "good.attn", "-o", small_disk, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (Exit.COULD_NOT_ASK, b"")
    assert run.stderr == f"error: {path}: no space left on device\n".encode()
    assert path.read_bytes() == before and sorted(os.listdir(small_disk)) == ["ballast.txt", "good.py"]
    os.unlink(small_disk / "ballast.txt")
    assert run_attnspec("build", "good.attn", "-o", small_disk, cwd=tmp_path).returncode == Exit.YES


@pytest.mark.parametrize("limit", [1, 4096, 20_000])
def test_a_file_that_may_not_grow_keeps_the_old_module(limit: int, tmp_path: Path) -> None:
    """The same where no disk can be mounted: the write itself fails after some bytes."""
    (tmp_path / "good.attn").write_text(DECODE)
    path = build(tmp_path / "good.attn", tmp_path)
    before = path.read_bytes()
    (tmp_path / "good.attn").write_text(spec_text(3))
    program = (
        "import resource, sys; from dsl.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "sys.argv[1:] = ['build', 'good.attn', '-o', '.']\nmain()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True)
    assert (run.returncode, run.stderr) == (Exit.COULD_NOT_ASK, b"error: good.py: file too large\n")
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["good.attn", "good.py"]


def test_a_specs_own_file_is_as_safe(tmp_path: Path) -> None:
    """`fmt` writes by the same means."""
    ugly = DECODE.replace("    ", " ")
    (tmp_path / "good.attn").write_text(ugly)
    program = (
        "import resource, sys; from dsl.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\nsys.argv[1:] = ['fmt', 'good.attn']\nmain()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True)
    assert (run.returncode, run.stderr) == (Exit.COULD_NOT_ASK, b"error: good.attn: file too large\n")
    assert (tmp_path / "good.attn").read_text() == ugly and os.listdir(tmp_path) == ["good.attn"]


# names and locales

FOLDERS = ["a b", "caf\u00e9", "\u4e2d\u6587", "-dash", "quote\"'", "line\nend", "\x1b[31mred", "emoji \U0001f600"]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    "locale", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["usual", "ASCII"]
)
def test_any_name_of_a_folder(folder: str, locale: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / folder
    home.mkdir()
    (home / "good.attn").write_text(DECODE)
    (home / "wrong.attn").write_text(DECODE.replace("64", "65"))
    path = Path(".", folder, "good.attn")
    built = run_attnspec("build", "-o", f"{folder}/out", "--", str(path), cwd=tmp_path, environment=locale)
    assert built.returncode == Exit.YES, built.stderr
    assert b"\x1b" not in built.stdout
    modules = list(tmp_path.rglob("good.py"))
    assert len(modules) == 1
    assert compare(generate(Source.from_text(DECODE, "good.attn")), modules[0]) is None
    for command in (["check"], ["check", "--json"], ["check", "--format", "github"], ["explain"], ["fmt", "--diff"]):
        run = run_attnspec(*command, "--", str(path.with_name("wrong.attn")), cwd=tmp_path, environment=locale)
        assert run.returncode in (Exit.YES, Exit.NO), run.stderr
        assert b"Traceback" not in run.stderr and b"\x1b" not in run.stdout + run.stderr
    missing = run_attnspec("check", "--", str(path.with_name("missing.attn")), cwd=tmp_path, environment=locale)
    assert missing.returncode == Exit.COULD_NOT_ASK
    assert missing.stderr.endswith(b"no such file or directory\n") and b"\x1b" not in missing.stderr
