"""A fuzzer of the road from a text to a module: parse, check, plan, render.

It mutates the texts of `corpus/` and lists every text that is answered with anything but a module or findings:

    python -m tests.fuzz --count 20000 --seed 1
    python -m tests.fuzz --grow --count 5000      keep in the corpus whatever reaches an edge that nothing else does

An edge is a line of the package and the line before it, in one frame.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from dsl.diagnostics import CATALOGUE, SpecError, render
from dsl.fmt import format_source
from dsl.pipeline import decode_source, generate
from dsl.source import Source
from tests.conftest import ROOT, SPECS
from tests.strategies import mutated, noise

CORPUS = ROOT / "tests" / "corpus"
PACKAGE = str(ROOT / "dsl")
STAGES = ("source", "items", "syntax", "wording", "check", "expr", "layout", "plan", "render", "fmt")
_ELSEWHERE = ("plan/cost", "expr/tiles", "expr/values")
"""Asked by `explain` and by the compile tests, not on the way to a module."""

SECONDS = 2.0
"""Of processor time, for one text."""

_NUMBERS = b"0 1 7 8 64 65 100 576 577 4096 65536 2147483647 2147483648 1e38 1e39 0.0 1e-45 1e-400 .5 5. 1_0".split()
_SIGNS = ["\0", "\x1b", "\x85", "\u2028", "\u202e", "\ufeff", "\u0130", "\u212a", "\u0661", '"""', "{{", "#}", "\\"]
_BYTES = [sign.encode() for sign in _SIGNS] + [b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\r", b"\n"]


class Fault(Exception):
    """A text that is answered neither by a module nor by findings."""


@dataclass
class Count:
    """What a run has seen."""

    texts: int = 0
    refused: int = 0
    built: int = 0
    codes: set[str] = field(default_factory=set)
    faults: list[tuple[bytes, str]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = f"{self.refused} refused with {len(self.codes)} codes"
        return f"{self.texts} texts: {kinds}, {self.built} built, {len(self.faults)} faults"


def corpus() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(CORPUS.glob("*.attn"))}


def seeds() -> list[bytes]:
    """What mutations start from: the corpus, most of which is refused, and as many times again specs that build."""
    folders = ROOT / "tests" / "specs", ROOT / "specs" / "models"
    good = [
        path.read_bytes() for path in (*SPECS, *(path for folder in folders for path in sorted(folder.glob("*.attn"))))
    ]
    found = list(corpus().values())
    return [*found, *good * (1 + len(found) // len(good))]


def answer(data: bytes, count: Count, patience: float = SECONDS) -> None:
    """Walk the whole road. Raises Fault, or whatever the tool lets out."""
    start = time.process_time()
    count.texts += 1
    try:
        source = decode_source("fuzzed.attn", data)
        formats = _formats(source)
        module = generate(source)
    except SpecError as error:
        count.refused += 1
        count.codes |= _proper(error)
    else:
        count.built += 1
        compile(module, "fuzzed.py", "exec", dont_inherit=True)
        if not formats:
            raise Fault("a spec that builds cannot be formatted")
    if (seconds := time.process_time() - start) > patience:
        raise Fault(f"the answer took {seconds:.1f} s")


def _formats(source: Source) -> bool:
    """Whether the text can be formatted, which then changes nothing a second time."""
    try:
        text = format_source(source)
    except SpecError:
        return False
    if format_source(Source.from_text(text, source.name)) != text:
        raise Fault("formatting twice is not formatting once")
    return True


def _proper(error: SpecError) -> set[str]:
    """The codes of a refusal that is all that it should be."""
    if not error.diagnostics:
        raise Fault("a refusal without a finding")
    end = len(error.source.text)
    for finding in error.diagnostics:
        if not 0 <= finding.span.start <= finding.span.end <= end + 1:
            raise Fault(f"{finding.code} points outside of the text")
    printed = "".join(render(error.source, error.diagnostics, form) for form in ("human", "short", "github"))
    if strange := [character for character in printed if not character.isprintable() and character != "\n"]:
        raise Fault(f"the findings print {strange[0]!r}")
    render(error.source, error.diagnostics, "json")
    codes = {finding.code for finding in error.diagnostics}
    if unknown := codes - set(CATALOGUE):
        raise Fault(f"unknown codes {unknown}")
    return codes


def mutation(texts: list[bytes], chance: random.Random) -> bytes:
    """A text made from one or two of the corpus, or from nothing."""
    kind = chance.random()
    if kind < 0.05:
        return noise(chance).encode("utf-8", "surrogatepass")
    if kind < 0.08:
        return chance.randbytes(chance.randrange(200))
    data = chance.choice(texts)
    if kind > 0.85:
        return chance.choice(_EDITS)(data, chance)
    if kind < 0.6:
        data = mutated(data.decode("utf-8", "replace"), chance).encode()
    elif kind < 0.75:
        data = _spliced(data, chance.choice(texts), chance)
    for _ in range(chance.randrange(3) if kind < 0.75 else chance.randint(2, 4)):
        data = chance.choice(_EDITS)(data, chance)
    return data


def _spliced(one: bytes, other: bytes, chance: random.Random) -> bytes:
    lines, more = one.splitlines(keepends=True), other.splitlines(keepends=True)
    start = chance.randrange(len(more) + 1)
    place = chance.randrange(len(lines) + 1)
    return b"".join((*lines[:place], *more[start : start + chance.randint(1, 8)], *lines[place:]))


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _insert(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.choice(_BYTES) + data[place:]


def _number(data: bytes, chance: random.Random) -> bytes:
    places = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    place = chance.choice(places)
    return data[:place] + chance.choice(_NUMBERS) + data[place + 1 :]


def _drop(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[place + chance.randint(1, 20) :]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[place : place + chance.randint(1, 30)] * chance.choice((2, 3, 120)) + data[place:]


_EDITS = (_flip, _insert, _number, _number, _drop, _repeat)


def fuzz(count: int, seed: int) -> Count:
    """Answer that many texts; what goes wrong is in the result."""
    texts = seeds()
    chance, seen = random.Random(seed), Count()
    for _ in range(count):
        data = mutation(texts, chance)
        try:
            answer(data, seen)
        except Exception:
            seen.faults.append((data, traceback.format_exc()))
    return seen


# which lines and edges a text reaches


class Tracer:
    """Records the edges of the package's stages while it is active."""

    def __init__(self) -> None:
        self.edges: set[tuple[CodeType, int, int]] = set()
        self._ours: dict[CodeType, bool] = {}

    def run(self, work: Callable[[], object]) -> set[tuple[CodeType, int, int]]:
        """The edges that the work reaches first."""
        before = len(self.edges)
        known = self.edges if before == 0 else set(self.edges)
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(previous)
        return self.edges - known if before else set(self.edges)

    def _enter(self, frame: FrameType, event: str, argument: object):
        code = frame.f_code
        if code not in self._ours:
            self._ours[code] = is_stage(code.co_filename)
        if not self._ours[code]:
            return None
        last = 0

        def line(frame: FrameType, event: str, argument: object):
            nonlocal last
            if event == "line":
                self.edges.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


def is_stage(filename: str) -> bool:
    if not filename.startswith(PACKAGE):
        return False
    path = Path(filename).relative_to(PACKAGE).with_suffix("")
    return path.parts[0] in STAGES and path.as_posix() not in _ELSEWHERE


def lines_of(path: Path) -> Iterator[int]:
    """The lines within functions that can run."""

    def walk(code: CodeType, depth: int) -> Iterator[int]:
        # A class body runs at import, as the module does.
        if depth and code.co_flags & 0x2:
            yield from {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from walk(constant, depth + 1)

    yield from walk(compile(path.read_text("utf-8"), str(path), "exec"), 0)


def quietly(data: bytes) -> Callable[[], None]:
    return lambda: answer(data, Count(), patience=float("inf"))


def grow(count: int, seed: int) -> None:
    """Add to the corpus what reaches a new edge, then keep the fewest files that reach all of them."""
    texts = list(corpus().values())
    if not texts:
        folders = (ROOT / "tests" / "cases", ROOT / "tests" / "specs")
        paths = [*SPECS, *(path for folder in folders for path in sorted(folder.glob("*.attn")))]
        texts = [data for path in paths if len(data := path.read_bytes()) < 4000]
    tracer, chance = Tracer(), random.Random(seed)
    answer(texts[0], Count())
    found = [data for data in sorted(texts, key=len) if tracer.run(quietly(data))]
    for _ in range(count):
        data = mutation(found, chance)
        if len(data) < 4000 and tracer.run(quietly(data)):
            found.append(data)
    keep = _fewest(found)
    CORPUS.mkdir(exist_ok=True)
    for path in CORPUS.glob("*.attn"):
        path.unlink()
    for data in keep:
        (CORPUS / f"{hashlib.sha256(data).hexdigest()[:12]}.attn").write_bytes(data)
    print(f"{len(keep)} files reach {len(tracer.edges)} edges")


def _fewest(texts: list[bytes]) -> list[bytes]:
    reach = {data: Tracer().run(quietly(data)) for data in texts}
    keep: list[bytes] = []
    rest = set().union(*reach.values())
    while rest:
        best = max(reach, key=lambda data: (len(reach[data] & rest), -len(data)))
        keep.append(best)
        rest -= reach[best]
    return keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", action="store_true")
    options = parser.parse_args()
    if options.grow:
        grow(options.count, options.seed)
        return
    seen = fuzz(options.count, options.seed)
    for data, trouble in seen.faults[:10]:
        print(repr(data), trouble, sep="\n", file=sys.stderr)
    print(seen)
    sys.exit(bool(seen.faults))


if __name__ == "__main__":
    main()
