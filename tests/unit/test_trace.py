"""`kvcover run --trace`: the timeline says what the history says, in a format that trace viewers read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, resolve, run_world
from kvcover.sim.results.depart import Step, steps_of
from kvcover.sim.results.trace import trace
from kvcover.sim.world import World

SCENARIOS: dict[str, dict[str, Any]] = {
    "write": {"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}},
    "read": {"release": "0.27.0", "mode": "read", "prefill": {"tp": 4}, "decode": {"tp": 2}},
    "dp": {"release": "0.33.0", "prefill": {"dp": 2}, "decode": {"dp": 2}},
    "hang": {"release": "0.27.0", "faults": ["drop-notice:write_done"]},
}


def timeline(world: World) -> str:
    return trace(world.setup, steps_of(world.history.rows))


SMALL = {"model": "layers=2,mla=64+16", "prompt_tokens": 32}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_event_is_one_instant_at_its_place_and_time(name: str) -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS[name])))[1]
    entries = json.loads(timeline(world))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    engines = {e["pid"]: e["args"]["name"].split()[0] for e in entries if e["name"] == "process_name"}
    told: Counter[tuple[int, str, str, int]] = Counter()
    for entry in entries:
        if entry["ph"] == "i":
            thread = threads[entry["pid"], entry["tid"]]
            actor = engines[entry["pid"]] if thread in ("scheduler", "legs") else thread
            told[round(entry.get("ts", 0.0) * 1000), entry["name"], actor, entry["args"].get("request", -1)] += 1
    assert told == Counter((row[0], row[1], row[2], row[4]) for row in world.history.rows)


def test_spans_are_as_long_as_blocks_are_held() -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS["write"])))[1]
    spans = {
        (e["pid"], e["name"]): (e.get("ts", 0.0), e["dur"]) for e in json.loads(timeline(world))["traceEvents"] if e["ph"] == "X"
    }
    at = {(e.kind, e.actor): e.time_ns / 1000 for e in world.history.events("allocated", "freed", "go")}
    for pid, actor in ((1, "P"), (2, "D")):
        start, held = spans[pid, "holds request 0"]
        assert (start, start + held) == pytest.approx((at["allocated", actor], at["freed", actor]))
    start, waited = spans[2, "waits for request 0"]
    assert (start, start + waited) == pytest.approx((at["allocated", "D"], at["go", "D"]))


def test_what_never_ends_says_so() -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS["hang"])))[1]
    names = {entry["name"] for entry in json.loads(timeline(world))["traceEvents"] if entry["ph"] == "X"}
    assert "waits for request 0, for ever" in names


def kvcover(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvcover", "run", *args], capture_output=True, text=True, check=False)


def test_the_option_writes_it_and_changes_nothing_else(tmp_path: Path) -> None:
    plain, traced = kvcover("--json"), kvcover("--json", "--trace", str(tmp_path / "t.json"))
    digests = [json.loads(done.stdout)["digest"] for done in (plain, traced)]
    assert digests[0] == digests[1]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trace", "/no/such/folder/t.json"), "--trace: can't write '/no/such/folder/t.json'"),
        (("-v",), "--verbose: the model tier looks into no connector; leave it out, or use --tier connector or hardware"),
        (("--trace", "t.json", "-o", "t.json"), "--trace: 't.json' is where -o writes"),
    ],
)
def test_nonsense_is_refused(args: tuple[str, ...], said: str) -> None:
    done = kvcover(*args)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def well_formed(entries: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What Perfetto needs of every entry; returns the arrows as (name, from, to), by threads' names."""
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for entry in entries:
        assert entry["ph"] in "iXMsf" and (entry["pid"], entry["tid"]) in threads
        assert entry["ph"] == "M" or entry.get("ts", 0.0) >= 0
        assert entry["ph"] != "X" or entry["dur"] >= 0
        assert entry["ph"] != "i" or entry["s"] == "t"
        if entry["ph"] in "sf":
            assert entry["cat"] and entry["ph"] not in ends.setdefault(entry["id"], {})
            ends[entry["id"]][entry["ph"]] = entry
    spans = [e for e in entries if e["ph"] == "X"]
    arrows = []
    for both in ends.values():
        start, finish = both["s"], both["f"]
        assert start["name"] == finish["name"] and start.get("ts", 0.0) <= finish.get("ts", 0.0) and finish["bp"] == "e"
        for end in (start, finish):  # each end is on a span of its thread, or nobody sees it
            place, at = (end["pid"], end["tid"]), end.get("ts", 0.0)
            assert any((s["pid"], s["tid"]) == place and s.get("ts", 0.0) <= at <= s.get("ts", 0.0) + s["dur"] for s in spans)
        arrows.append((start["name"], threads[start["pid"], start["tid"]], threads[finish["pid"], finish["tid"]]))
    return arrows


@pytest.mark.parametrize("name", SCENARIOS)
def test_arrows_go_from_what_was_sent_to_where_it_arrived(name: str) -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS[name])))[1]
    arrows = Counter(well_formed(json.loads(timeline(world))["traceEvents"]))
    events = world.history.events
    moved = Counter((f"layer {e.layer} of request {e.request}", e.actor, e.peer) for e in events("wrote", "read"))
    assert {arrow: count for arrow, count in arrows.items() if arrow[0].startswith("layer")} == moved
    for kind, what in (("blocks_ready", "blocks_ready"), ("write_done", "write_done"), ("release", "release")):
        heard = Counter((f"{what} of request {e.request}", e.actor) for e in events(kind))
        assert Counter((said, to) for said, _, to in arrows.elements() if said.startswith(what)) == heard
    told = {(e.actor, e.peer) for e in events("write_done")}
    assert {(to, by) for said, by, to in arrows if said.startswith("write_done")} == told


def test_without_one_clock_there_are_no_arrows() -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS["write"])))[1]
    assert well_formed(json.loads(trace(world.setup, steps_of(world.history.rows), one_clock=False))["traceEvents"]) == []


def test_a_scheduler_that_dies_in_a_real_run_is_on_its_engines_track() -> None:
    setup = resolve(build(SMALL | SCENARIOS["write"]))
    entries = json.loads(trace(setup, [Step(5000, "crashed", "decode scheduler 0", detail="KeyError: 3")]))["traceEvents"]
    (crash,) = (entry for entry in entries if entry["ph"] == "i")
    engines = {e["pid"]: e["args"]["name"].split()[0] for e in entries if e["name"] == "process_name"}
    assert (engines[crash["pid"]], crash["ts"], crash["args"]["detail"]) == ("D", 5.0, "KeyError: 3")


def test_two_messages_of_one_rank_are_two_arrows_in_their_order() -> None:
    steps = [Step(at, "write_done_sent", "P0", "D0", 0) for at in (1000, 2000)]
    steps += [Step(at, "write_done", "D0", "P0", 0) for at in (5000, 6000)]
    entries = json.loads(trace(resolve(build(SMALL | SCENARIOS["write"])), steps))["traceEvents"]
    assert len(well_formed(entries)) == 2
    assert [e["ts"] for e in entries if e["ph"] in "sf"] == [1.0, 5.0, 2.0, 6.0]
