"""`--trace`: the timeline says what the history says, in the trace event format that Perfetto and chrome://tracing read.

The format's rules are written down here (`check_format`), from the public document "Trace Event Format" and from how Perfetto
imports it: what breaks one is dropped or drawn elsewhere without a word.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, resolve, run_world
from kvcover.sim.kernel.events import KINDS
from kvcover.sim.results.depart import Step, steps_of
from kvcover.sim.results.read import read_result
from kvcover.sim.results.trace import lines, trace
from kvcover.sim.simulate import steps_of_result, traced

ROOT = Path(__file__).parents[2]
SCENARIOS: dict[str, dict[str, Any]] = {
    "write": {"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}},
    "read": {"release": "0.27.0", "mode": "read", "prefill": {"tp": 4}, "decode": {"tp": 2}},
    "dp": {"release": "0.33.0", "prefill": {"dp": 2}, "decode": {"dp": 2}},
    "hang": {"release": "0.27.0", "faults": ["drop-notice:write_done"]},
    "many": {"release": "0.33.0", "prefill": {"tp": 4}, "decode": {"tp": 2}, "requests": 6, "prompt_tokens": 4096},
    "no time": {"release": "0.33.0", "fabric": "loopback"},
    "slow": {"release": "0.33.0", "faults": ["delay-transfer:write,ms=9"], "prefill": {"tp": 2}, "decode": {"tp": 2}},
}
SMALL = {"model": "layers=2,mla=64+16", "prompt_tokens": 32}
Entry = dict[str, Any]
Arrow = tuple[str, str, str]


def timeline(name: str, **options: Any) -> list[Entry]:
    setup = resolve(build(SMALL | SCENARIOS[name]))
    return list(json.loads(trace(setup, traced(setup)[1], **options))["traceEvents"])


# -- the format --------------------------------------------------------------------------------------------------


def check_format(entries: list[Entry]) -> list[Arrow]:
    """Hold the entries against the format's rules; returns the arrows as (name, from, to), by names of tracks."""
    names = _check_metadata(entries)
    for entry in entries:
        if entry["ph"] == "M":
            continue
        assert entry["ph"] in "iXsf", "instants, complete slices, ends of flows; nothing else is written here"
        assert isinstance(entry["name"], str) and entry["name"]
        assert type(entry["pid"]) is int and type(entry["tid"]) is int
        assert (entry["pid"], entry["tid"]) in names, "every track has a name"
        assert isinstance(entry["ts"], int | float) and entry["ts"] >= 0, "a time in microseconds"
        assert ("dur" in entry) == (entry["ph"] == "X") and entry.get("dur", 0) >= 0
        assert entry.get("s") == ("t" if entry["ph"] == "i" else None), "an instant of one thread"
    _check_nesting(entries)
    return _check_flows(entries, names)


def _check_metadata(entries: list[Entry]) -> dict[tuple[int, int], str]:
    """Processes and tracks are named once each, and have a place in order; returns the names of tracks."""
    found: dict[str, dict[Any, Any]] = defaultdict(dict)
    for entry in entries:
        if entry["ph"] == "M":
            key = entry["pid"] if entry["name"].startswith("process") else (entry["pid"], entry["tid"])
            assert key not in found[entry["name"]], "named twice"
            ((field, value),) = entry["args"].items()
            assert field == ("sort_index" if entry["name"].endswith("sort_index") else "name")
            assert "ts" not in entry
            found[entry["name"]][key] = value
    assert set(found) == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    assert set(found["process_name"]) == {pid for pid, _ in found["thread_name"]} == set(found["process_sort_index"])
    assert set(found["thread_name"]) == set(found["thread_sort_index"])
    return found["thread_name"]


def _ns(us: float) -> int:
    """As Perfetto keeps times."""
    return round(us * 1000)


def _check_nesting(entries: list[Entry]) -> None:
    """Slices of one track lie inside or after each other: Perfetto cuts or drops one that overlaps."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            tracks[entry["pid"], entry["tid"]].append((_ns(entry["ts"]), _ns(entry["ts"] + entry["dur"])))
    for slices in tracks.values():
        still: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while still and still[-1] <= start:
                still.pop()
            assert not still or end <= still[-1], "overlaps another of its track"
            still.append(end)


def _check_flows(entries: list[Entry], names: dict[tuple[int, int], str]) -> list[Arrow]:
    """An s and an f with one id, name and category, in this order, each on a slice that begins where it is; f binds to it."""
    ends: dict[int, dict[str, Entry]] = defaultdict(dict)
    begin = {(e["pid"], e["tid"], e["ts"]) for e in entries if e["ph"] == "X"}
    for entry in entries:
        if entry["ph"] in "sf":
            assert entry["ph"] not in ends[entry["id"]], "an id is of one arrow"
            assert (entry["pid"], entry["tid"], entry["ts"]) in begin, "an arrow that is on no slice is not drawn"
            ends[entry["id"]][entry["ph"]] = entry
    arrows = []
    for both in ends.values():
        start, finish = both["s"], both["f"]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"]) and start["cat"]
        assert start["ts"] <= finish["ts"] and finish["bp"] == "e" and "bp" not in start
        arrows.append((start["name"], names[start["pid"], start["tid"]], names[finish["pid"], finish["tid"]]))
    return arrows


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_format_is_kept(name: str) -> None:
    assert check_format(timeline(name))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entries: entries.append(next(e for e in entries if e["ph"] == "s") | {"id": 10**6}),
        lambda entries: entries.append(next(e for e in entries if e["ph"] == "i") | {"tid": 7777}),
        lambda entries: next(e for e in entries if e["ph"] == "f").pop("bp"),
        lambda entries: next(e for e in entries if e["ph"] == "f").update(ts=1e9),
        lambda entries: entries.append({"name": "x", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0}),
        lambda entries: entries.extend({"name": "x", "ph": "X", "pid": 0, "tid": 0, "ts": at, "dur": 2} for at in (0.0, 1.0)),
        lambda entries: entries.append(next(e for e in entries if e["ph"] == "M")),
    ],
)
def test_what_breaks_a_rule_is_seen(spoil: Any) -> None:
    entries = timeline("write")
    spoil(entries)
    with pytest.raises((AssertionError, KeyError)):
        check_format(entries)


# -- what it says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_event_is_one_entry_at_its_place_and_time(name: str) -> None:
    """A batch by when it landed, which is when the history has it; all else by when it was."""
    entries = timeline(name)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    engines = {e["pid"]: e["args"]["name"].split()[0] for e in entries if e["name"] == "process_name"}
    told: Counter[tuple[int, str, str, int]] = Counter()
    for entry in entries:
        if entry["ph"] in "iX" and entry["name"] in KINDS:
            thread = threads[entry["pid"], entry["tid"]]
            actor = entry["args"].get("from") or (engines[entry["pid"]] if thread in ("scheduler", "legs") else thread)
            at = entry["ts"] + (entry["dur"] if entry["name"] in ("wrote", "read") else 0)
            told[_ns(at), entry["name"], actor, entry["args"].get("request", -1)] += 1
    history = run_world(resolve(build(SMALL | SCENARIOS[name])))[1].history
    assert told == Counter((row[0], row[1], row[2], row[4]) for row in history.rows)


def test_slices_are_as_long_as_blocks_are_held() -> None:
    world = run_world(resolve(build(SMALL | SCENARIOS["write"])))[1]
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in timeline("write") if e["ph"] == "X"}
    at = {(e.kind, e.actor): e.time_ns / 1000 for e in world.history.events("allocated", "freed", "go")}
    for pid, actor in ((1, "P"), (2, "D")):
        start, held = spans[pid, "holds request 0"]
        assert (start, start + held) == pytest.approx((at["allocated", actor], at["freed", actor]))
    start, waited = spans[2, "waits for request 0"]
    assert (start, start + waited) == pytest.approx((at["allocated", "D"], at["go", "D"]))


def test_a_batch_takes_what_the_fabric_says() -> None:
    """Alone on the wire: a fixed cost, and bytes by bandwidth. One layer of 32 tokens of 80 elements in 2 bytes is 5120 bytes."""
    fabric = {"write_fixed_ns": 3000, "write_gb_per_s": 2.0, "read_fixed_ns": 3000, "read_gb_per_s": 2.0}
    setup = resolve(build(SMALL | {"release": "0.33.0", "fabric": fabric}))
    assert [step.took_ns for step in traced(setup)[1] if step.kind == "wrote"] == [3000 + 5120 // 2] * 2


def test_what_never_ends_says_so() -> None:
    assert "waits for request 0, for ever" in {entry["name"] for entry in timeline("hang") if entry["ph"] == "X"}


def test_batches_that_overlap_are_on_lanes_of_their_rank() -> None:
    setup = resolve(build(SMALL | SCENARIOS["write"]))
    steps = [
        Step(at, "wrote", "P0", f"D{to}", 0, layer, "", took)
        for layer, (at, took, to) in enumerate([(0, 5000, 0), (3000, 5000, 1), (9000, 10, 0)])
    ]
    entries = json.loads(trace(setup, steps))["traceEvents"]
    check_format(entries)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    lanes = {e["args"]["layer"]: threads[e["pid"], e["tid"]] for e in entries if e["name"] == "wrote"}
    assert lanes == {0: "P0 batches", 1: "P0 batches 2", 2: "P0 batches"}
    order = [threads[key] for key in sorted(threads)]
    assert order[order.index("P0") :][:4] == ["P0", "P0 batches", "P0 batches 2", "P1"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_arrows_go_from_what_was_sent_to_where_it_arrived(name: str) -> None:
    arrows = Counter(check_format(timeline(name)))
    events = run_world(resolve(build(SMALL | SCENARIOS[name])))[1].history.events
    moved = Counter((f"layer {e.layer} of request {e.request}", e.actor, e.peer) for e in events("wrote", "read"))
    assert Counter({arrow: count for arrow, count in arrows.items() if arrow[0].startswith("layer")}) == moved
    for kind, what in (("blocks_ready", "blocks_ready"), ("write_done", "write_done"), ("release", "release")):
        heard = Counter((f"{what} of request {e.request}", e.actor) for e in events(kind))
        assert Counter((said, to) for said, _, to in arrows.elements() if said.startswith(what)) == heard
    told = {(e.actor, e.peer) for e in events("write_done")}
    assert {(to, by) for said, by, to in arrows if said.startswith("write_done")} == told


def test_without_one_clock_there_are_no_arrows() -> None:
    entries = timeline("write", one_clock=False)
    assert check_format(entries) == [] and any(e["name"] == "wrote" and e["ph"] == "X" for e in entries)


def test_a_batch_whose_end_nobody_saw_is_an_instant_without_an_arrow() -> None:
    setup = resolve(build(SMALL | SCENARIOS["write"]))
    entries = json.loads(trace(setup, [Step(1000, "wrote", "P0", "D0", 0, 1)]))["traceEvents"]
    assert check_format(entries) == [] and [e["ph"] for e in entries if e["name"] == "wrote"] == ["i"]


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
    assert len(check_format(entries)) == 2
    assert [e["ts"] for e in entries if e["ph"] in "sf"] == [1.0, 5.0, 2.0, 6.0]


def test_asking_for_a_timeline_does_not_change_the_run() -> None:
    setup = resolve(build(SMALL | SCENARIOS["many"]))
    result, steps = traced(setup)
    other, world = run_world(setup)
    assert result.digest == other.digest
    assert [(s.kind, s.actor, s.peer) for s in steps] == [(s.kind, s.actor, s.peer) for s in steps_of(world.history.rows)]
    assert all(step.took_ns >= 0 for step in steps if step.kind in ("wrote", "read"))


# -- lines, and the commands -------------------------------------------------------------------------------------


def test_lines_are_the_events_in_order() -> None:
    steps = traced(resolve(build(SMALL | SCENARIOS["many"])))[1]
    rows = [json.loads(line) for line in lines(steps).splitlines()]
    assert len(rows) == len(steps) and [row["time_ns"] for row in rows] == sorted(step.time_ns for step in steps)
    for row in rows:
        assert list(row) == ["time_ns", "kind", "actor", "peer", "request", "layer", "took_ns", "detail"]
        assert (row["took_ns"] is not None) == (row["kind"] in ("wrote", "read")) and -1 not in row.values()


def kvcover(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvcover", *args], capture_output=True, text=True, check=False)


def test_the_option_writes_it_and_changes_nothing_else(tmp_path: Path) -> None:
    plain, result = kvcover("run", "--json"), str(tmp_path / "r.json")
    seen = kvcover("run", "--json", "-o", result, "--trace", str(tmp_path / "t.json"))
    digests = [json.loads(done.stdout)["digest"] for done in (plain, seen)]
    assert digests[0] == digests[1]
    check_format(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert kvcover("why", result, "--trace", str(tmp_path / "again.json")).returncode == 0
    assert (tmp_path / "again.json").read_text() == (tmp_path / "t.json").read_text()
    assert kvcover("why", result, "--trace", str(tmp_path / "t.jsonl")).returncode == 0
    assert json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["time_ns"] == 0


def test_a_real_results_events_are_drawn_as_they_were_kept(tmp_path: Path) -> None:
    """What a real run's result keeps of it, as plain data; no model is asked."""
    setup = resolve(build(SMALL | SCENARIOS["write"]))
    result = run_world(setup)[0].to_dict()
    events = [[10, "wrote", "P0", "D0", 0, 1, "took 5000 ns", 5000], [6000, "write_done", "D0", "P0", 0, -1, "", -1]]
    result |= {"tier": "connector", "digest": None, "backend": {"events": events, "stories": [["it went"]], "mori": "loopback"}}
    (tmp_path / "real.json").write_text(json.dumps(result))
    done = kvcover("why", str(tmp_path / "real.json"), "--trace", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [name for name, _, _ in check_format(entries)] == ["layer 1 of request 0"]
    assert [(e["ts"], e["dur"]) for e in entries if e["name"] == "wrote"] == [(0.01, 5.0)]


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_timeline_of_a_real_run_keeps_the_format_too(side: str) -> None:
    """Runs of vLLM's own connector, TP8 each, two layers of one request, as they were kept: a batch a rank and layer."""
    place = str(ROOT / "docs" / "evidence" / "2026-12-01-h200" / "confirm" / f"{side}.json")
    result = read_result(place)
    assert result.tier == "connector"
    arrows = check_format(json.loads(trace(resolve(build(result.scenario or {})), steps_of_result(place, result)))["traceEvents"])
    moved = {arrow for arrow in arrows if arrow[0].startswith("layer")}
    to = {rank: "D0" if side == "before" else f"D{rank}" for rank in range(8)}  # the rank collapse, and its repair
    assert moved == {(f"layer {layer} of request 0", f"P{rank}", to[rank]) for layer in (0, 1) for rank in to}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trace", "/no/such/folder/t.json"), "--trace: can't write '/no/such/folder/t.json'"),
        (("-v",), "--verbose: the model tier looks into no connector; leave it out, or use --tier connector or hardware"),
        (("--trace", "t.json", "-o", "t.json"), "--trace: 't.json' is where -o writes"),
    ],
)
def test_nonsense_is_refused(args: tuple[str, ...], said: str) -> None:
    done = kvcover("run", *args)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
