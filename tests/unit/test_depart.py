"""The first events in which two runs depart from each other."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import build, resolve, run_world
from kvcover.sim.results.depart import Step, departures, steps_of

SMALL = {"model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}, "prompt_tokens": 32}


def steps(**fields: Any) -> list[Step]:
    return steps_of(run_world(resolve(build(SMALL | fields)))[1].history.rows)


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_run_has_the_events_of_itself_in_whatever_order(mode: str) -> None:
    ours = steps(release="0.27.0", mode=mode)
    shuffled = ours.copy()
    random.Random(3).shuffle(shuffled)
    later = [msgspec.structs.replace(step, time_ns=step.time_ns * 3 + 5) for step in shuffled]
    assert departures(ours, later, "there") == []


def test_who_dialled_elsewhere_is_named_before_what_follows_from_it() -> None:
    lines = departures(steps(release="0.26.0"), steps(release="0.27.0"), "0.27.0")
    assert lines[:2] == ["here, and not in 0.27.0: P1 handshook: D0 answered", "in 0.27.0, and not here: P1 handshook: D1 answered"]
    assert not any("P1 wrote" in line for line in lines)


def test_a_lost_message_is_named_as_what_was_not_heard() -> None:
    lines = departures(steps(faults=["drop-notice:write_done,to=D1"]), steps(), "the good run")
    assert lines[0] == "in the good run, and not here: D1 got a write_done"


def test_a_crash_that_only_one_has_is_named_whoever_died_of_it() -> None:
    crash = [Step(5, "crashed", "P3", detail="KeyError: 'x' (in save, moriio_engine.py:5)"), Step(9, "ended", "D", request=0)]
    assert departures(crash, [Step(7, "crashed", "prefill scheduler 0"), Step(8, "ended", "D", request=0)], "there") == []
    (line,) = departures(crash, crash[1:], "there")
    assert line == "here, and not in there: P3 died: KeyError: 'x' (in save, moriio_engine.py:5)"


def test_layers_that_one_rank_did_not_write() -> None:
    whole = [Step(layer, "wrote", "P0", "D0", 0, layer) for layer in range(4)]
    assert departures(whole[:1], whole, "there") == ["in there, and not here: P0 wrote 3 layers into D0"]
    assert departures(whole, whole[:1], "there") == ["here, and not in there: P0 wrote 3 layers into D0"]


def test_a_result_keeps_events_as_short_rows() -> None:
    ours = steps(release="0.26.0")
    assert msgspec.convert(json.loads(msgspec.json.encode(ours)), list[Step]) == ours
    assert all(step.peer for step in ours if step.kind.endswith("_sent"))


def why(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvcover", "why", *args], capture_output=True, text=True, check=False)


def test_a_baseline_of_the_model_is_played_again(tmp_path: Path) -> None:
    files = []
    for release in ("0.26.0", "0.27.0"):
        file = tmp_path / f"{release}.json"
        file.write_text(run_world(resolve(build(SMALL | {"release": release})))[0].to_json())
        files.append(str(file))
    done = why(files[0], "--baseline", files[1])
    assert done.returncode == 0, done.stderr
    assert f"here, and not in {files[1]}: P1 handshook: D0 answered" in done.stdout.splitlines()
    assert (
        why(files[0], "--baseline", files[0]).stdout.splitlines()[-1]
        == f"the same events as {files[0]}, whatever their order and number"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "holds no scenario; give a file written by `kvcover run -o FILE`"),
        ("[", "is not one JSON object; give a file written by `kvcover run -o FILE`"),
        ('{"scenario": {}, "backend": {"events": [[1]]}}', "keeps no events of its run; write it again with `kvcover run -o FILE`"),
        ('{"scenario": {}, "backend": {}}', "keeps no events of its run; write it again with `kvcover run -o FILE`"),
        ('{"scenario": {}}', "keeps no events of its run; write it again with `kvcover run -o FILE`"),
    ],
)
def test_a_baseline_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(run_world(resolve(build(SMALL)))[0].to_json())
    bad.write_text(text)
    done = why(str(good), "--baseline", str(bad))
    assert (done.returncode, done.stderr) == (2, f"kvcover: {bad}: {said}\n")
