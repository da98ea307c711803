"""Peers: found where they are, asked what they can take, checked before they are timed, and timed in turn with us."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

from dsl.bench.peers import DEFAULT, KNOWN, PeerError, Peers, find
from dsl.bench.peers.flex import Flex
from dsl.bench.peers.sdpa import Sdpa
from dsl.bench.peers.work import Refused, reason_against
from dsl.bench.report import Beside, Report, Row
from dsl.bench.runner import bench_block, bench_files
from dsl.bench.table import table
from tests.bench_fakes import LIMITS, MACHINE, PREFILL, FakeClock, attend, file_of, job_of
from tests.conftest import run_python
from tests.peer_fakes import SECONDS, FakePeer, Library, VllmKernel, flashinfer, module


def packed(workload: str, fields: str = "heads = 4 / 2") -> str:
    return f"attention small {{ query = packed  kv = packed  dtype = bf16  {fields}  head_dim = 16 }}\n{workload}"


def paged(layouts: str = "", fields: str = "heads = 8 / 2  head_dim = 32") -> str:
    return (
        f"attention small {{ query = single  kv = paged(block = 16)  dtype = fp16  {fields}  {layouts} }}\n"
        "workload small { kv_len = [[20, 33, 16]] }"
    )


RAGGED = packed("workload small { q_len = [[5, 9, 1]]  kv_len = [[7, 30, 4]] }")
SAME = packed("workload small { seqs = 3  q_len = 5  kv_len = 8 }")
X_SPLIT = "k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, dim, slot]"
HND = "k_cache = [block, kv_head, slot, dim]  v_cache = [block, kv_head, slot, dim]"


def row_of(text: str, clock: FakeClock, **peers) -> Row:
    file = file_of(text)
    (row,) = bench_block(job_of(file, small=attend(file, clock)), clock, LIMITS, peers)
    return row


# The contest.


def test_a_right_peer_is_timed_beside_us():
    clock = FakeClock()
    row = row_of(PREFILL, clock, slow=FakePeer(clock, seconds=4e-4), fast=FakePeer(clock, seconds=5e-5))
    assert row.passed and row.latency_us == pytest.approx(100)
    slow, fast = row.peers["slow"], row.peers["fast"]
    assert (slow.status, slow.mode, slow.problem) == ("PASSED", "graph", None)
    assert slow.us == pytest.approx(400) and slow.eager_us == pytest.approx(410)
    assert slow.tflop_per_s == pytest.approx(row.flops / 4e-4 / 1e12)
    assert slow.tb_per_s == pytest.approx(row.bytes / 4e-4 / 1e12)
    assert slow.error is not None and row.bar is not None and slow.error <= row.bar
    assert fast.us == pytest.approx(50) and row.ratio == pytest.approx(0.5)


def late(out: torch.Tensor, count: int) -> torch.Tensor:
    return out if count < 30 else 2 * out


def crash(out: torch.Tensor, count: int) -> torch.Tensor:
    raise RuntimeError("no kernel image")


def crash_late(out: torch.Tensor, count: int) -> torch.Tensor:
    return out if count < 60 else crash(out, count)


@pytest.mark.parametrize(
    ("options", "status", "problem"),
    [
        ({"change": lambda out, count: 2 * out}, "INCORRECT_NUMERICAL", "the error is"),
        ({"change": lambda out, count: out * float("nan")}, "INCORRECT_NUMERICAL", "the output is not finite"),
        ({"change": late}, "INCORRECT_NUMERICAL", "right when called alone, but as it was timed: the error is"),
        ({"change": crash}, "RUNTIME_ERROR", "RuntimeError: no kernel image"),
        ({"change": crash_late}, "RUNTIME_ERROR", "RuntimeError: no kernel image"),
        (
            {"change": lambda out, count: out[:, :, :8]},
            "RUNTIME_ERROR",
            "ValueError: its result has the shape [9, 2, 8]",
        ),
        ({"refusal": ValueError("odd heads")}, "RUNTIME_ERROR", "ValueError: odd heads"),
        ({"refusal": Refused("takes odd heads only")}, "LEFT_OUT", "takes odd heads only"),
    ],
    ids=["wrong", "not finite", "wrong later", "crashes", "crashes later", "wrong shape", "cannot bind", "refuses"],
)
def test_a_peer_without_a_right_answer_has_no_time_and_harms_nobody(options: dict, status: str, problem: str):
    clock = FakeClock()
    row = row_of(PREFILL, clock, bad=FakePeer(clock, **options), good=FakePeer(clock))
    bad, good = row.peers["bad"], row.peers["good"]
    assert (bad.status, bad.us, bad.eager_us, bad.tflop_per_s) == (status, None, None, None)
    assert bad.problem is not None and bad.problem.startswith(problem)
    assert row.passed and row.latency_us == pytest.approx(100)
    assert good.us == pytest.approx(200) and row.ratio == pytest.approx(2)


def test_a_result_that_is_not_written_again_is_noticed():
    """The run that was timed must compute: an answer that is kept from the first call is none."""
    kept: list[torch.Tensor] = []

    def keep(out: torch.Tensor, count: int) -> torch.Tensor:
        kept.append(out)
        return kept[0]

    clock = FakeClock()
    bad = row_of(PREFILL, clock, bad=FakePeer(clock, keep)).peers["bad"]
    assert bad.problem is not None and "as it was timed: the output is not finite" in bad.problem


def test_where_we_are_wrong_no_peer_is_asked():
    clock, file = FakeClock(), file_of(PREFILL)
    peer = FakePeer(clock)
    ours = attend(file, clock, fault=lambda count: True)
    (row,) = bench_block(job_of(file, small=ours), clock, LIMITS, {"fake": peer})
    assert row.status == "INCORRECT_NUMERICAL" and row.peers == {} and peer.log == []


def test_all_take_turns():
    clock, file, log = FakeClock(), file_of(PREFILL), []
    right = attend(file, clock, 2e-3)

    def ours(*tensors, **buffers):
        log.append("ours")
        return right(*tensors, **buffers)

    peers = {name: FakePeer(clock, seconds=2e-3, name=name, log=log) for name in ("a", "b")}
    (row,) = bench_block(job_of(file, small=ours), clock, LIMITS, peers)
    assert row.mode == row.peers["a"].mode == "eager"
    assert "".join(name[0] for name in log).count("oab" * 21) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("dtype = fp32", "takes bf16 and fp16"),
        ("dtype = bf16  mask = causal", "plain attention"),
        ("dtype = bf16  score = softcap(score, 30)", "plain attention"),
    ],
)
def test_other_attention_is_not_compared(fields: str, said: str):
    (spec,) = file_of(
        f"attention small {{ query = packed  kv = packed  heads = 2  head_dim = 16  {fields} }}"
    ).attentions
    reason = reason_against(spec)
    assert reason is not None and said in reason
    clock = FakeClock()
    plain = file_of(PREFILL).attentions[0]
    assert reason_against(plain) is None
    text = "attention small { query = packed  kv = packed  dtype = fp32  heads = 2  head_dim = 16 }"
    file = file_of(text + " workload small { q_len = 9 }")
    limits = type(LIMITS)(LIMITS.copy, {"fp32": 1e14})
    (row,) = bench_block(job_of(file, small=attend(file, clock)), clock, limits, {"fake": FakePeer(clock)})
    assert row.peers["fake"] == Beside("LEFT_OUT", problem="takes bf16 and fp16, not fp32")


def test_a_mask_that_hides_nothing_is_compared():
    fields = "query = single  kv = paged(block = 16)  dtype = bf16  heads = 2  head_dim = 64"
    text = f"attention small {{ {fields}  mask = %s }}"
    assert reason_against(file_of(text % "causal").attentions[0]) is None
    assert reason_against(file_of(text % "q - kv < 9").attentions[0]) is not None


# Each peer, called as its library is called.


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def library(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Library:
    """No peer is installed, whatever this machine has, and a library that may be put in one's place."""
    absent = ("flash_attn_interface", "flash_attn.cute.interface", "flashinfer", "vllm.vllm_flash_attn")
    kernels = ("vllm.v1.attention.ops.chunked_prefill_paged_decode", "vllm.attention.ops.chunked_prefill_paged_decode")
    for name in (*absent, *kernels, "vllm", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    return Library(clock)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members) -> None:
    """A module, and the packages around it."""
    for end, letter in enumerate(name):
        if letter == ".":
            monkeypatch.setitem(sys.modules, name[:end], module(name[:end], __path__=[]))
    monkeypatch.setitem(sys.modules, name, module(name, **members))


def own(library: Library, monkeypatch: pytest.MonkeyPatch) -> str | None:
    members = {name: getattr(library, name) for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")}
    install(monkeypatch, "flash_attn_interface", **members)
    return None


def vllms(library: Library, monkeypatch: pytest.MonkeyPatch) -> str | None:
    members = {"is_fa_version_supported": lambda version: version == 3}
    install(monkeypatch, "vllm.vllm_flash_attn", flash_attn_varlen_func=library.flash_attn_varlen_func, **members)
    return None


def shared_object(library: Library, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    return "/lib/_vllm_fa3_C.abi3.so"


FA3 = [(own, "with_kvcache"), (vllms, "varlen 3"), (shared_object, "varlen None")]


@pytest.mark.parametrize(("way", "call"), FA3, ids=["package", "vllm", "shared object"])
def test_flash_attention_3(
    way: Callable, call: str, clock: FakeClock, library: Library, monkeypatch: pytest.MonkeyPatch
):
    peers = find(["fa3"], fa3=way(library, monkeypatch))
    row = row_of(RAGGED, clock, **peers.of("prefill"))
    assert row.peers["fa3"].status == "PASSED", row.peers
    assert row.peers["fa3"].us == pytest.approx(1e6 * SECONDS)
    library.calls.clear()
    row = row_of(paged(), clock, **peers.of("decode"))
    assert row.peers["fa3"].status == "PASSED", row.peers
    assert set(library.calls) == {call}
    row = row_of(paged(X_SPLIT), clock, **peers.of("decode"))
    assert row.peers["fa3"].problem == "reads caches as [block, slot, kv_head, dim] only"
    row = row_of(paged(fields="heads = 2  head_dim = 264"), clock, **peers.of("decode"))
    assert row.peers["fa3"].problem == "takes head dimensions up to 256"


def test_vllm_may_lack_flash_attention_3(library: Library, monkeypatch: pytest.MonkeyPatch):
    members = {"is_fa_version_supported": lambda version: False, "fa_version_unsupported_reason": "no FA{}".format}
    install(monkeypatch, "vllm.vllm_flash_attn", **members)
    assert "vLLM: no FA" in find(["fa3"]).absent["fa3"]


def test_flash_attention_4(clock: FakeClock, library: Library, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "flash_attn.cute.interface", flash_attn_varlen_func=library.flash_attn_varlen_func)
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "__version__", "4.0.0", raising=False)
    peers = find(["fa4"])
    assert peers.found["fa4"].origin == "flash_attn.cute.interface 4.0.0"
    assert row_of(RAGGED, clock, **peers.of("prefill")).peers["fa4"].status == "PASSED"
    assert peers.of("decode") == {}


def test_flash_infer(clock: FakeClock, library: Library, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(library))
    peers = find(["flashinfer"])
    assert peers.found["flashinfer"].origin == "flashinfer 0.7.4"
    assert row_of(RAGGED, clock, **peers.of("prefill")).peers["flashinfer"].status == "PASSED"
    for layout in ("", HND):
        for heads in ("heads = 8 / 2", "heads = 4 / 2"):
            text = paged(layout, f"{heads}  head_dim = 32")
            assert row_of(text, clock, **peers.of("decode")).peers["flashinfer"].status == "PASSED"
    assert {"paged NHD", "paged HND"} < set(library.calls)
    assert row_of(paged(X_SPLIT), clock, **peers.of("decode")).peers["flashinfer"].status == "LEFT_OUT"


@pytest.mark.parametrize(
    ("split", "layouts", "taken"),
    [(True, X_SPLIT, True), (True, "", False), (False, "", True), (False, HND, True), (False, X_SPLIT, False)],
)
def test_vllms_kernel(
    split: bool, layouts: str, taken: bool, clock: FakeClock, library: Library, monkeypatch: pytest.MonkeyPatch
):
    home = "vllm.v1.attention.ops.chunked_prefill_paged_decode"
    install(monkeypatch, home, kernel_paged_attention_2d=VllmKernel(library, split))
    found = row_of(paged(layouts), clock, **find(["vllm"]).of("decode")).peers["vllm"]
    assert found.status == ("PASSED" if taken else "LEFT_OUT"), found.problem
    small_pages = paged(layouts).replace("block = 16", "block = 8")
    found = row_of(small_pages, clock, **find(["vllm"]).of("decode")).peers["vllm"]
    assert found.problem == "takes pages of a power of two from 16 tokens on"


def timed(peer, clock: FakeClock):
    """A peer that really computes, for which the fake clock would stand still."""

    def bind(work):
        attention = peer.bind(work)
        return lambda: (clock.spend(SECONDS), attention())[1]

    return SimpleNamespace(name=peer.name, origin=peer.origin, bind=bind)


TRANSPOSED = "heads = 4 / 2  q = [head, q_token, dim]  k = [kv_head, kv_token, dim]  out = [head, q_token, dim]"


@pytest.mark.parametrize(
    "text", [SAME, SAME.replace("heads = 4 / 2", "heads = 2"), SAME.replace("heads = 4 / 2", TRANSPOSED)]
)
def test_torchs_operator(text: str, clock: FakeClock):
    """Through the backend that every torch has: layouts, lengths and grouped heads are what is tested."""
    peer = timed(Sdpa("math", "torch", SDPBackend.MATH, "Math"), clock)
    row = row_of(text, clock, math=peer)
    assert row.peers["math"].status == "PASSED", row.peers["math"].problem
    ragged = row_of(RAGGED, clock, math=peer).peers["math"]
    assert (ragged.status, ragged.problem) == ("LEFT_OUT", "takes sequences of one length only")


@pytest.mark.parametrize(
    ("backend", "title"), [(SDPBackend.CUDNN_ATTENTION, "cuDNN"), (SDPBackend.FLASH_ATTENTION, "Flash")]
)
def test_a_backend_that_has_no_kernel_says_why(backend: SDPBackend, title: str, clock: FakeClock):
    """On the CPU cuDNN has none at all, and torch's own FlashAttention none for another dimension of values."""
    text = SAME if title == "cuDNN" else SAME.replace("head_dim = 16", "head_dim = 16 / 24")
    found = row_of(text, clock, sdpa=Sdpa("sdpa", "torch", backend, title)).peers["sdpa"]
    assert found.status == "LEFT_OUT"
    assert found.problem is not None and found.problem.startswith(f"torch has no {title} kernel for it")


def test_the_reason_of_a_backend_is_its_own():
    warned = [
        "Memory efficient kernel not used because: (Triggered internally at a.cpp:1.)",
        "Memory efficient attention has been runtime disabled. (Triggered internally at a.cpp:2.)",
        "cuDNN attention kernel not used because: (Triggered internally at a.cpp:3.)",
        "head_dim should be a multiple of 8. (Triggered internally at a.cpp:4.)",
    ]
    peer = Sdpa("cudnn", "torch", SDPBackend.CUDNN_ATTENTION, "cuDNN")
    assert peer._reason(warned) == ": head_dim should be a multiple of 8."
    assert peer._reason([]) == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("text", [SAME, SAME.replace("heads = 4 / 2", "heads = 2")])
def test_flex(text: str, clock: FakeClock):
    """Not compiled, which takes a minute; that a shape too many is an error, and no slow answer, is set."""
    import torch._dynamo.config as config

    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        assert set(find(["flex"]).found) == {"flex"}
        assert config.fail_on_recompile_limit_hit and config.recompile_limit > 100
    row = row_of(text, clock, flex=timed(Flex("flex", "torch", flex_attention), clock))
    assert row.peers["flex"].status == "PASSED", row.peers["flex"].problem


# Who is there.


def test_what_is_not_installed_is_named(library: Library):
    peers = find(["fa3", "fa4", "flashinfer", "vllm", "fa2"])
    assert set(peers.found) == {"fa2"}
    assert peers.absent["fa4"] == "no module flash_attn.cute.interface"
    assert "--fa3 takes" in peers.absent["fa3"]
    assert set(find(["fa4", "vllm"], ["decode"]).absent) == {"vllm"}


def test_what_was_asked_for_must_be_there(library: Library):
    with pytest.raises(PeerError, match=r"fa4: no module flash_attn\.cute"):
        find(["fa2", "fa4"], required=["fa4"])
    with pytest.raises(PeerError, match=r"fa3: /nowhere\.so cannot be loaded: OSError"):
        find(["fa3"], fa3="/nowhere.so")
    assert find(["vllm"], ["prefill"], required=["vllm"]).absent == {
        "vllm": "it is asked about decode, which no block is"
    }


def test_a_library_that_fails_at_import_is_absent(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    said = "flashinfer cannot be imported: OSError: libcudart.so.13: cannot open shared object file"
    assert find(["flashinfer"]).absent == {"flashinfer": said}


def test_flex_is_not_asked_by_itself():
    assert set(KNOWN) - set(DEFAULT) == {"flex"}


def test_peers_are_looked_up_without_torch():
    run = run_python(
        "-c",
        "import sys, dsl.bench.peers, dsl.bench.report, dsl.cli.bench, dsl.cli.tune; print('torch' in sys.modules)",
    )
    assert (run.returncode, run.stdout.split()) == (0, [b"False"]), run.stderr.decode()


# What is said about them.


def report_of(*rows: Row, absent: dict[str, str] | None = None) -> Report:
    return Report(MACHINE, LIMITS, rows, (), {"fake": "a test"}, absent or {})


def row_with(case: str, **peers: Beside) -> Row:
    return Row("a.attn", "small", case, "PASSED", 1, 1, latency_us=10.0, tflop_per_s=1.0, peers=peers, ratio=1.5)


WRONG = Beside("INCORRECT_NUMERICAL", error=float("inf"), problem="the error is inf")
LEFT_OUT = Beside("LEFT_OUT", problem="takes sequences of one length only")


def test_a_reason_is_said_once():
    rows = [row_with(f"{count} seqs", fa2=WRONG, cudnn=LEFT_OUT) for count in (2, 3)]
    remarks = report_of(*rows, row_with("1 seq", fa2=WRONG), absent={"fa4": "no module flash_attn"}).remarks
    assert remarks == (
        "fa2 is WRONG (the error is inf): small (3 cases)",
        "cudnn is left out (takes sequences of one length only): small (2 cases)",
        "fa4 is not here: no module flash_attn",
    )
    assert report_of(row_with("1 seq", fa3=Beside("PASSED", us=1.0))).remarks == ()
    crashed = Beside("RUNTIME_ERROR", problem="RuntimeError: no\nand much more")
    assert report_of(row_with("1 seq", fa3=crashed)).remarks == ("fa3 FAILED (RuntimeError: no): small (1 seq)",)


def test_a_peer_does_not_decide_whether_the_report_passes():
    report = report_of(row_with("1 seq", fa2=WRONG))
    assert report.passed
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (data["schema"], data["peers"], data["absent"]) == ("attnspec.bench/2", {"fake": "a test"}, {})
    (row,) = data["rows"]
    assert row["peers"]["fa2"]["error"] == "inf" and row["ratio"] == 1.5 and row["online"] is None
    fields = ["status", "mode", "us", "eager_us", "tb_per_s", "tflop_per_s", "error", "problem"]
    assert list(row["peers"]["fa2"]) == fields


def test_the_table_is_readable_in_120_columns():
    from rich.console import Console

    fine = Beside("PASSED", "graph", 12345.6, 12400.0, 1.0, 500.0, 1e-3)
    peers = dict.fromkeys(("cudnn", "fa2", "fa3", "fa4", "flashinfer"), fine)
    row = row_with("512 seqs, q_len 1..300", **{**peers, "fa2": WRONG, "cudnn": LEFT_OUT})
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table(report_of(row)))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 120
    header, cells = (line.split() for line in text.splitlines() if line.split()[:1] in (["block"], ["small"]))
    assert header[-6:] == ["cudnn", "fa2", "fa3", "fa4", "flashinfer", "ratio"]
    assert cells[-6:] == ["-", "wrong", "12346", "12346", "12346", "1.50"]


def test_files_are_benched_with_the_peers_of_their_family(tmp_path):
    """Without a GPU our own kernel refuses its tensors, so no peer is asked; what was found is in the report."""
    path = tmp_path / "attend.attn"
    path.write_text(PREFILL)
    clock = FakeClock()
    peers = Peers({"fa2": FakePeer(clock)}, {"fa4": "no module flash_attn"})
    report = bench_files([path], clock=clock, peers=peers)
    assert (dict(report.peers), dict(report.absent)) == ({"fa2": "a test"}, {"fa4": "no module flash_attn"})
    assert not report.passed and report.rows[0].peers == {}


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "attend.attn"
    block = "attention small { query = packed  kv = packed  dtype = bf16  heads = 16 / 4  head_dim = 64 }"
    path.write_text(f"{block} workload small {{ seqs = [2, 1]  q_len = [256, 2048] }}")
    report = bench_files([path], peers=find(["cudnn", "fa2"], required=["cudnn", "fa2"]))
    assert report.passed, report.failures
    for row in report.rows:
        assert {name: peer.status for name, peer in row.peers.items()} == {"cudnn": "PASSED", "fa2": "PASSED"}, (
            row.peers
        )
        assert row.ratio is not None and 0.1 < row.ratio < 100
