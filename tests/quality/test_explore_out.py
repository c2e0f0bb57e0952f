"""Exploration on disk: nothing that ran is lost, the same command goes on, and what can't be written is found before the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcover import InputError
from kvcover.sim.commands.explore import explore as explore_command
from kvcover.sim.search.explore import INTERRUPTED, KILLED, run_jobs, seed_jobs
from kvcover.sim.search.failures import Exploration, Tallied
from kvcover.sim.search.journal import NAME, Journal
from kvcover.sim.search.swarm import Swarm, features_of

SMALL = Swarm(features=("tp", "fabric"), pins={"release": "0.26.0", "model": "layers=1,mla=8", "mode": "write"})
DRAWN = ["--release", "0.26.0", "--model", "layers=1,mla=8", "--mode", "write", "--features", "tp,fabric"]


def explored(*words: str) -> Result:
    return CliRunner().invoke(explore_command, ["--jobs", "1", *DRAWN, *words], catch_exceptions=False)


def digest(result: Result) -> str:
    return result.stdout.splitlines()[-1]


def test_the_same_command_goes_on_and_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = explored("--seeds", "170")
    first = explored("--seeds", "60", "--out", str(tmp_path))
    assert "goes on" not in first.stderr
    second = explored("--seeds", "170", "--out", str(tmp_path))
    assert "has 60 runs of it already" in second.stderr
    assert "110 runs in" in second.stderr
    assert digest(second) == digest(whole)
    assert second.stdout.splitlines()[4] == whole.stdout.splitlines()[4], "as many of each outcome"
    third = explored("--seeds", "170", "--out", str(tmp_path))
    assert "0 runs in" in third.stderr
    assert digest(third) == digest(whole)


def test_half_a_line_that_a_killed_command_left_is_run_again(tmp_path: Path) -> None:
    whole = digest(explored("--seeds", "120", "--out", str(tmp_path)))
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    again = explored("--seeds", "120", "--out", str(tmp_path))
    assert "20 runs in" in again.stderr
    assert digest(again) == digest(explored("--seeds", "120", "--out", str(tmp_path))) == whole


def test_another_exploration_is_not_mixed_in(tmp_path: Path) -> None:
    explored("--seeds", "3", "--out", str(tmp_path))
    for words in (["--seed-start", "9"], ["--prefill", "tp=2"], ["--baseline", "0.27.0"]):
        with pytest.raises(InputError, match="another exploration"):
            explored("--seeds", "3", "--out", str(tmp_path), *words)
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().replace('"runs":3', '"runs":"3"'))
    with pytest.raises(InputError, match="line 2"):
        explored("--seeds", "3", "--out", str(tmp_path))


def test_results_of_edited_code_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working copy goes by the same path whatever is in it."""
    from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
    from kvcover.real_backend.tiers.connector import connector_tier

    monkeypatch.setattr("kvcover.sim.search.explore_tier.TierExploration.run", lambda self, drafts: self.summary)
    folder = tmp_path / "copy" / MORIIO_FOLDER
    folder.mkdir(parents=True)
    for name in ("moriio_connector.py", "moriio_engine.py"):
        (folder / name).write_text("")
    copy = str(tmp_path / "copy")

    def again() -> Result:
        words = ["--tier", "connector", "--vllm", copy, "--release", "0.33.0", "--seeds", "3", "--out", str(tmp_path / "out")]
        return CliRunner().invoke(explore_command, words, catch_exceptions=False)

    assert again().exit_code == again().exit_code == 0
    (folder / "moriio_engine.py").write_text("# better")
    with pytest.raises(
        InputError, match=r"--out: .* is of other code: decode's moriio_engine\.py, prefill's moriio_engine\.py changed"
    ):
        again()
    (folder / "moriio_engine.py").write_text("")
    assert again().exit_code == 0
    assert (
        connector_tier.code_of(copy)["prefill's moriio_engine.py"] == connector_tier.code_of(copy)["decode's moriio_connector.py"]
    )


@pytest.mark.parametrize("out", ["", "file", "file/inside", "\0", "x" * 300])
def test_a_folder_that_can_not_be_written_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("kvcover.sim.search.explore.run_jobs", None)
    with pytest.raises(InputError, match="--out"):
        explored("--seeds", "3", "--out", out)


def test_a_full_disk_ends_it_with_what_ran_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []

    def write(self: Journal, line: bytes) -> None:
        kept.append(line)
        if len(kept) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "_write", write)
    done = explored("--seeds", "200", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    assert done.stdout.splitlines()[4].startswith("50 runs")


def test_file_names_need_no_quotes(tmp_path: Path) -> None:
    explored("--seeds", "20", "--out", str(tmp_path))
    names = [path.name for path in tmp_path.glob("*.toml")]
    assert names
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEF0123456789.-_") for name in names)


# -- what ends it --------------------------------------------------------------------------------------------------


class Breaks(Executor):
    """Does the first jobs, then dies, or is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.jobs = error, 0

    def submit(self, call: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs += 1
        if self.jobs > 2:
            future.set_exception(self.error)
        else:
            future.set_result(call(*arguments, **named))
        return future


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt(), INTERRUPTED), (BrokenProcessPool(), KILLED)])
def test_what_ran_before_the_end_is_there(error: BaseException, ended: str) -> None:
    kept: list[Tallied] = []
    summary = run_jobs(seed_jobs(SMALL, 0, 500), Breaks(error), 1, keep=kept.append)
    assert (summary.ended, summary.runs, len(kept)) == (ended, 100, 2)
    assert summary.digest == run_jobs(seed_jobs(SMALL, 0, 100)).digest


def test_ctrl_c_keeps_what_ran(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvcover", "explore", "--jobs", "1", "--seeds", "1000000", "--out", str(tmp_path), *DRAWN]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    ) as process:  # fmt: skip
        path, deadline = tmp_path / NAME, time.monotonic() + 100
        while time.monotonic() < deadline and not (path.exists() and len(path.read_bytes().splitlines()) > 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"{INTERRUPTED} after" in err
    runs = sum(json.loads(line)["runs"] for line in path.read_text().splitlines()[1:])
    assert runs >= 50 and f"{runs} runs before {INTERRUPTED}" in out


# -- what is asked of runs -------------------------------------------------------------------------------------------


def test_what_the_scenario_expects_is_asked_of_each_run() -> None:
    pins = {"release": "0.26.0", "model": "layers=1,mla=8", "mode": "write", "prefill": {"tp": 2}, "decode": {"tp": 2}}
    wanted = {"outcome": "corrupt", "race": None}
    bad = run_jobs(seed_jobs(Swarm(features=(), pins=pins), 0, 3))
    assert bad.failures == 3
    expected = run_jobs(seed_jobs(Swarm(features=(), pins={**pins, "expect": {**wanted, "coverage": 0.5}}), 0, 3))
    assert expected.failures == 0
    other = run_jobs(seed_jobs(Swarm(features=(), pins={**pins, "expect": {**wanted, "coverage": 1.0}}), 0, 3))
    assert other.failures == 3


@pytest.mark.parametrize(
    "pins",
    [{"model": "deepseek-v3"}, {"model": "llama-3.1-8b"}, {"model": "gemma-3-27b"}, {"prefill": {"tp": 3}}, {"block_size": 64},
     {"model": "layers=2,mla=64+16", "release": "0.33.0", "decode": {"block_size": 32}}],
)  # fmt: skip
def test_what_is_drawn_fits_the_pins(pins: dict[str, Any]) -> None:
    """A pinned MLA model has no packed layout: what makes no sense beside the pins is not drawn."""
    from kvcover import build, resolve

    swarm = Swarm(features=features_of(None, full=True, faults=True), pins=pins)
    drawn = set()
    for seed in range(60):
        draft = swarm.draft(seed)
        resolve(build(draft))
        drawn |= set(draft)
    assert "faults" in drawn and "fabric" in drawn, "and what fits still is"


def test_no_more_is_begun_on_a_real_tier_when_the_budget_is_over() -> None:
    from kvcover.sim.search.explore_tier import TierExploration, drafts_of
    from tests.real.test_explore_tier import FakeTier, as_the_model

    def slow(result: Any, count: int) -> Any:
        time.sleep(0.05)
        return as_the_model(result, count)

    tier, kept = FakeTier(slow), list[Tallied]()
    first = TierExploration(tier, budget_s=0.4, keep=kept.append).run(drafts_of(tier, seed_jobs(SMALL, 0, 200)))
    assert 0 < first.runs < 40, "not even one batch"
    assert first.stopped and first.runs == len(kept)
    restored = Exploration()
    for report in kept:
        restored.count(report)
    done = dict(tier.runs)
    TierExploration(FakeTier(), summary=restored).run(drafts_of(tier, seed_jobs(SMALL, 0, 60)))
    assert restored.runs == 60
    assert len(done) >= first.runs - first.outcomes.get("skipped", 0)
