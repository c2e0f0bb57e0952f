"""The connector tier: what it refuses, what it measures on vLLM's own connector, and how it ends when things go wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import Result, build
from kvcover.faults import parse_fault
from kvcover.real_backend.driver import processes
from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.machine import trees
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.errors import InputError, TierError
from tests.measured.test_measured import ROWS, observed, rounded, scenario_of
from tests.real.made_up_trees import hash_made_up, made_up_tree
from tests.unit.test_packaging import OTHERS, OURS, litter

SMALL = {"model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}}
vllm = pytest.mark.vllm


def needs(*releases: str) -> None:
    """Skip, and say why, where a release's tree isn't here."""
    try:
        trees.check_machine()
        for release in releases:
            trees.find(release)
    except TierError as error:
        pytest.skip(f"NOT RUN: {error} (or set KVCOVER_TREES)")


# -- without vLLM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"prefill": {"tp": 2, "pp": 2}}, "prefill.pp"),
        ({"decode": {"tp": 2, "max_tokens_per_step": 64}}, "decode.max_tokens_per_step"),
        ({"decode": {"tp": 2, "dp": 2, "pods": 2}}, "decode.pods"),
        ({"workload": {"concurrency": 1}}, "workload"),
        ({"rdma": {"sq_depth": 4}}, "rdma"),
        ({"overrides": {"peer_tp": "own_size"}}, "overrides"),
        ({"fabric": "thor2"}, "fabric"),
        ({"requests": [{"decode_hit_blocks": 1, "suffix_only": True}]}, "requests[0].suffix_only"),
        ({"prefill": {"tp": 64}}, "prefill"),
        ({"timing": {"message_ns": 1}}, "timing"),
    ],
)
def test_what_the_harness_cannot_do_is_refused_by_name(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(TierError) as error:
        to_trial(build(SMALL | fields))
    assert error.value.place == place


def test_nothing_is_refused_that_is_a_default() -> None:
    trial = to_trial(build({"prefill": {"tp": 2}, "decode": {"tp": 2}, "fabric": "loopback", "seed": 3}))
    assert trial.setup.geometry.layers == 32


def test_timers_of_the_scenario_are_kept() -> None:
    own, kept = (to_trial(build(SMALL | timers)).limits for timers in ({}, {"timers": {"defer_timeout_s": 7}}))
    assert kept == replace(own, defer_s=7) != own


def test_a_trial_reaches_the_ranks_without_what_only_the_router_has() -> None:
    """Planned faults tell a default by its identity, which a pickle would lose."""
    faults = ["fail-transfer:write,layer=1", "drop:remote_tp_size@prefill"]
    trial = replace(to_trial(build(SMALL | {"faults": faults})), book=Path("book"), completion_delay_s=0.5)
    there = pickle.loads(pickle.dumps(trial))
    assert there.setup == trial.setup and [str(fault) for fault in there.setup.faults] == faults
    assert (there.limits, there.book, there.completion_delay_s) == (trial.limits, Path("book"), 0.5)
    assert (there.legs, there.keys.faults) == ((), ())


def test_key_faults_act_on_the_legs_and_count() -> None:
    trial = to_trial(build(SMALL | {"faults": ["drop:remote_tp_size@prefill", "drop:nothing"]}))
    assert "remote_tp_size" not in trial.legs[0].prefill
    assert trial.keys.fired == [1, 0]


def _count(book: Path, times: int) -> None:
    injector = SharedInjector([parse_fault("drop-notice:write_done,n=5")], book)
    for _ in range(times):
        injector.event("notice", "write_done", "P0", "D0", 0)


def test_a_fault_fires_on_the_nth_event_of_the_run_whichever_process_has_it(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("spawn").Process(target=_count, args=(tmp_path / "book", 50)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert SharedInjector([parse_fault("drop-notice:write_done,n=5")], tmp_path / "book").totals() == (1,)


def test_a_port_in_use_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    with processes.reserve_ports() as (first, _), socket.socket() as taken:
        taken.bind((processes.HOST, first.notify + 200))
        taken.listen(1)
        with processes.reserve_ports() as (second, _):
            assert not first.handshake <= second.handshake < first.handshake + 256


def test_a_tree_of_another_release_than_the_scenarios_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path))
    monkeypatch.setattr(trees, "_missing", lambda _names: [])
    hash_made_up(monkeypatch)
    made_up_tree(tmp_path / "vllm" / "0.27.0", "0.27.0", "0.27.0")
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    with pytest.raises(InputError, match="leave out one"):
        connector_tier.run(build(SMALL | {"release": "0.26.0"}), vllm="0.27.0")


def test_a_tree_that_says_two_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path))
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    hash_made_up(monkeypatch)
    folder = made_up_tree(tmp_path / "vllm" / "0.26.0", "0.26.0", "0.26.0")
    version = folder / "vllm/_version.py"
    version.write_text("__version__ = version = '0.26.0+empty'\n")
    assert trees.find("0.26.0").version == trees.find(str(folder)).version == "0.26.0"
    version.write_text("__version__ = version = '0.33.0'\n")
    for name in ("0.26.0", str(folder)):
        with pytest.raises(TierError, match=r"is vLLM 0\.26\.0 by its dist-info, and 0\.33\.0 by its vllm/_version\.py"):
            trees.find(name)


def test_without_a_tree_it_says_what_to_do(kvcover: Any) -> None:
    done = kvcover("run", "--tier", "connector", "--release", "0.27.0")
    assert done.returncode == 2
    assert "kvcover vllm add 0.27.0" in done.stderr or "kvcover[connector]" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def kvcover(tmp_path: Path) -> Any:
    """The command, with no tree to be found."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key != "KVCOVER_TREES"}
        command = [sys.executable, "-m", "kvcover", *words]
        return subprocess.run(
            command, env=clean | {"KVCOVER_CACHE": str(tmp_path)} | environment, capture_output=True, text=True, timeout=300
        )

    return run


@vllm
def test_a_users_modules_are_not_those_of_the_ranks(tmp_path: Path) -> None:
    """The command was started in a folder whose modules end whatever imports them; what it starts is not in their reach."""
    needs("0.26.0")
    script, folder = tmp_path / "bin" / "kvcover", tmp_path / "work"
    for path in (script.parent, folder):
        path.mkdir()
    script.write_text("from kvcover.sim.cli import main\nmain()\n")
    words = [
        "run",
        "--tier",
        "connector",
        "--release",
        "0.26.0",
        "--model",
        "layers=2,mla=64+16",
        "--prefill",
        "4",
        "--decode",
        "4",
    ]
    done = subprocess.run(
        [sys.executable, str(script), *words, "--json"], cwd=litter(folder, (*OURS, *OTHERS, "torch.py", "vllm.py", "zmq.py")),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout)["coverage"] == 0.25  # measured: row 0.26.0/write/p4d4/mla/toy


# -- on vLLM's own connector -------------------------------------------------------------------------------------------

_MEASURED = (
    "0.26.0/write/p4d4/mla/toy",
    "0.26.0/write/p1d1x2/mla/toy",
    "0.27.0/write/p4d2/gqa8/toy",
    "0.27.0/write/p2d4/mla/toy+drop:remote_tp_size",
    "0.27.0/read/p4d4/mla/toy",
    "0.33.0/write/p2d4/mla/toy",
    "0.33.0/read/p2d4/gqa2/toy",
    "0.33.0/read/p1d1/sliding/caches=one-table>usual/toy",
    "0.33.0/write/p2d4/mla+gqa8/toy",
)


@vllm
@pytest.mark.parametrize("release", ["0.26.0", "0.27.0", "0.33.0"])
def test_the_tier_gives_what_was_measured(release: str) -> None:
    needs(release)
    rows = [row for row in ROWS if row["id"] in _MEASURED and row["release"] == release]
    assert len(rows) >= 2
    results = connector_tier.many([build(scenario_of(row) | {"timers": {}}) for row in rows])
    for row, result in zip(rows, results, strict=True):
        assert {name: rounded(value) for name, value in observed(result, row["expect"]).items()} == row["expect"], row["id"]
        assert result.tier == "connector"
        assert "race" in row or result.stray is not None
        assert "--tier connector" in result.replay


@vllm
def test_a_failed_read_of_a_model_with_several_block_tables_is_handed_to_vllms_scheduler() -> None:
    needs("0.33.0")
    model = "layers=4,kv_heads=8,head_dim=8,window=32,full_every=2"
    result = connector_tier.run(
        build({"mode": "read", "model": model, "prompt_tokens": 64, "faults": ["fail-transfer:read,layer=1"]})
    )
    assert result.outcome == "crash"
    assert any("multiple KV cache groups" in finding.text for finding in result.findings)


@vllm
@pytest.mark.parametrize(("release", "layer", "released"), [("0.32.0", 0, 2), ("0.32.0", 1, 0), ("0.33.0", 0, 0), ("0.33.0", 1, 0)])
def test_a_failed_read_beside_recurrent_states_kills_decode(release: str, layer: int, released: int) -> None:
    needs(release)
    model = "layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=2"
    sizes = {"prefill": {"tp": 2}, "decode": {"tp": 2}}
    read = {"release": release, "mode": "read", "model": model, "prompt_tokens": 64, **sizes}
    result = connector_tier.run(build({**read, "faults": [f"fail-transfer:read,layer={layer}"]}))
    assert (result.outcome, len(result.sets.prefill_released or ())) == ("crash", released)
    assert result.coverage == pytest.approx(0.6 if layer == 0 else 0.9)


@pytest.fixture(scope="module")
def faulty() -> dict[tuple[str, str], Result]:
    """Some faults of every class on two releases, in one go."""
    needs("0.27.0", "0.33.0")
    keys = [(release, fault) for release in ("0.27.0", "0.33.0") for fault in _FAULTS]
    scenarios = [build(SMALL | {"release": release, "faults": [fault]}) for release, fault in keys]
    return dict(zip(keys, connector_tier.many(scenarios), strict=True))


_FAULTS = {
    "drop-notice:write_done,to=D1": ("hang", 1.0, ["D0"], 1),
    "poison-notice:write_done,to=D0": ("hang", 1.0, ["D1"], 1),
    "duplicate-notice:write_done,to=D0": ("ok", 1.0, ["D0", "D1"], 1),
    "delay-notice:remote_blocks,ms=200": ("ok", 1.0, ["D0", "D1"], 2),
    "fail-transfer:write": ("crash", 0.0, [], 4),
    "early-completion:write,ms=300": ("corrupt", 0.0, ["D0", "D1"], 4),
    "delay-transfer:write,ms=200": ("ok", 1.0, ["D0", "D1"], 4),
    "stall-rank:P1,ms=0,for=200": ("ok", 1.0, ["D0", "D1"], 1),
    "crash-rank:P0,ms=0": ("crash", None, None, 1),
}


@vllm
@pytest.mark.parametrize("release", ["0.27.0", "0.33.0"])
@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_of_each_class_acts_on_the_real_connector(faulty: dict[tuple[str, str], Result], fault: str, release: str) -> None:
    outcome, coverage, told, fired = _FAULTS[fault]
    result = faulty[release, fault]
    # a write that was deferred fails in the writer thread, which only logs it: then the step that waits comes too early to
    # see it, and the request hangs instead (0.27.0, moriio_engine._process_deferred_tasks)
    either = {outcome, "hang"} if fault.startswith("fail-transfer") else {outcome}
    assert result.outcome in either
    assert [each.fired for each in result.faults] == [fired]
    if coverage is not None:
        assert (result.coverage, result.sets.told) == (coverage, told)


@vllm
def test_a_fault_that_never_fires_makes_the_run_vacuous() -> None:
    needs("0.33.0")
    assert connector_tier.run(build(SMALL | {"faults": ["drop-notice:release,n=7"]})).outcome == "vacuous"


@vllm
def test_the_two_engines_may_be_of_two_releases() -> None:
    needs("0.26.0", "0.27.0")
    result = connector_tier.run(build(SMALL | {"release": "0.26.0", "decode_release": "0.27.0", "decode": {"tp": 4}}))
    assert (result.release, result.decode_release, result.outcome) == ("0.26.0", "0.27.0", "hang")
    assert result.coverage == 0.25


@vllm
def test_a_hang_says_where_each_rank_stands() -> None:
    needs("0.33.0")
    result = connector_tier.run(build(SMALL | {"faults": ["drop-notice:write_done"]}))
    (hang,) = [finding for finding in result.findings if finding.kind == "hang"]
    assert "timers" in hang.text
    assert {name for cause in hang.causes for name in cause.split(", last step: ")[0].split(", ")} == {"D0", "D1", "P0", "P1"}


# What is found in a real run, from what was seen there, in words that are not the harness's own but the model's.
FOUND = {
    ("0.26.0", "write", "ok"): {"wrong-peer", "told-without-data"},
    ("0.27.0", "write", "drop:remote_tp_size"): set(),
    ("0.27.0", "write", "drop-notice:write_done,to=D1"): {"never-told", "hang"},
    ("0.33.0", "read", "fail-transfer:read"): {"transfer-failed"},
    ("0.27.0", "read", "delay-transfer:read,ms=300"): {"used-before-landing"},
}


@vllm
@pytest.mark.parametrize(("release", "mode", "fault"), FOUND)
def test_the_one_judge_finds_in_a_real_run_what_is_there(release: str, mode: str, fault: str) -> None:
    needs(release)
    faults = [] if fault == "ok" else [fault]
    result = connector_tier.run(build(SMALL | {"release": release, "mode": mode, "faults": faults}))
    assert {finding.kind for finding in result.findings} == FOUND[release, mode, fault]
    unseen = {check.name for check in result.checks if check.verdict == "unknown"}
    assert {"no-use-before-landing", "no-race", "source-held", "queues-bounded"} <= unseen
    assert result.backend is not None
    assert result.backend["stories"][0][-1].startswith(f"so: {result.by_request[0]}")


# -- when things go wrong ----------------------------------------------------------------------------------------------

_MARK = "KVCOVER_TEST_RUN"
_WAITS = ("--tier", "connector", "--release", "0.33.0", "--prefill", "tp=2", "--decode", "tp=2", "--model", "layers=2,mla=64+16",
          "--fault", "drop-notice:write_done", "--set", "timers.defer_timeout_s=120")  # fmt: skip


def _marked(mark: str) -> list[int]:
    """Living processes that descend from a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes()
                and "Z" not in (entry / "stat").read_text().split(")")[1][:3]
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _hear_sigint() -> None:
    """A shell's background job ignores SIGINT, and so would every process it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run that hangs for two minutes, once all its processes are up."""
    needs("0.33.0")
    mark = f"{tmp_path.name}-{os.getpid()}"
    command = [sys.executable, "-m", "kvcover", "run", *_WAITS]
    with subprocess.Popen(
        command,
        env=os.environ | {_MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_sigint,
    ) as process:
        deadline = time.monotonic() + 120
        while (
            len(_marked(mark)) < 9 and time.monotonic() < deadline and process.poll() is None
        ):  # command, guard, server, 2 + 4 children
            time.sleep(0.2)
        time.sleep(2.0)
        yield process, mark
        process.kill()


def _ranks(process: subprocess.Popen[str], mark: str) -> list[int]:
    """Processes that the server forked, oldest first; a few of them start helpers of their own."""
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in _marked(mark)}
    guards = [pid for pid, stat in stats.items() if int(stat[1]) == process.pid]
    servers = [pid for pid, stat in stats.items() if int(stat[1]) in guards]
    return sorted((pid for pid, stat in stats.items() if int(stat[1]) in servers), key=lambda pid: int(stats[pid][19]))


def _gone(mark: str) -> bool:
    deadline = time.monotonic() + 10
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not _marked(mark)


@vllm
def test_ctrl_c_ends_it_with_nothing_left(waiting: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = waiting
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error.strip()) == (130, "kvcover: interrupted")
    assert _gone(mark)


@vllm
def test_a_rank_that_is_killed_from_outside_is_no_result(waiting: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = waiting
    os.kill(_ranks(process, mark)[-1], signal.SIGKILL)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "killed by SIGKILL" in error and error.count("\n") == 1
    assert _gone(mark)


@vllm
def test_a_rank_that_never_answers_is_named(waiting: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = waiting
    os.kill(_ranks(process, mark)[-1], signal.SIGSTOP)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "is stopped" in error and error.count("\n") == 1
    assert _gone(mark)


@vllm
def test_a_killed_command_leaves_nothing(waiting: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = waiting
    process.kill()
    process.communicate(timeout=20)
    assert _gone(mark)


@vllm
def test_a_tree_that_the_harness_cannot_drive_names_the_call(tmp_path: Path) -> None:
    needs("0.33.0")
    broken = tmp_path / "broken"
    (broken / "vllm").mkdir(parents=True)
    source = trees.find("0.33.0").path
    assert source is not None
    for entry in (source / "vllm").iterdir():
        if entry.name != "distributed":
            (broken / "vllm" / entry.name).symlink_to(entry)
    subprocess.run(["cp", "-r", str(source / "vllm/distributed"), str(broken / "vllm")], check=True)
    file = broken / MORIIO_FOLDER / "moriio_connector.py"
    file.write_text(file.read_text().replace("def on_new_request(self, request", "def on_new_request(self, surprise, request"))
    with pytest.raises(TierError, match=r"TypeError.*on_new_request"):
        connector_tier.run(build(SMALL), vllm=str(broken))


def test_measured_rows_are_still_there() -> None:
    assert set(_MEASURED) <= {row["id"] for row in ROWS}
    assert tomllib is not None
