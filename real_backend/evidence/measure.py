"""Measure the table of the real connector: `python -m kvcover.real_backend.evidence.measure --tree TREE --release R --out FILE`.

One process measures one release. Rows that are measured again are replaced, all others stay, so that releases can be
measured in any order. `--only TEXT` restricts to scenarios whose id contains TEXT, `--missing` to those that FILE lacks, so that
a measurement can be gone on with; `--show` prints everything that was seen. A file of another harness is never added to.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.driver.race import NO_BARRIER, OVERWRITTEN, Unsteady
from kvcover.real_backend.evidence.observe import Observed, observe, tree_at
from kvcover.real_backend.evidence.plan import Planned, planned
from kvcover.sim import launch
from kvcover.sim.releases.records import PUBLISHED
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import RequestSpec, Scenario, Side

_HEADER = """\
# Measured with vLLM's own, unmodified MoRI-IO connector, scheduler and KV cache manager, one process a rank, over a stand-in
# mori.io.
# Written by `python -m kvcover.real_backend.evidence.measure`; do not edit. expect.* is by decode rank in (dp, tp) order;
# coverage is counted at go, or at the end where nothing went. A row with `race` has only what can't differ between runs.
"""
_REPEATS_OF_A_RACE = 4
_SLOW_S = 0.2
_ALWAYS = ("coverage", "wrong", "told", "written", "prefill_told", "prefill_released", "outcome")
_FIELDS = ("coverage", "wrong", "covered_plus_wrong", "coverage_end", *_ALWAYS[2:])
_REQUEST = ("prefill_dp", "decode_dp", "prefill_blocks", "decode_blocks", "external_zero", "generate_ns")
_ENGINE = ("block_size", "layout", "order", "kv_dtype", "hybrid_kv", "lookahead_tokens")
MeasuredRow = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m kvcover.real_backend.evidence.measure", description=__doc__)
    parser.add_argument("--tree", type=Path, required=True, help="a vLLM source tree")
    parser.add_argument("--release", choices=PUBLISHED, required=True, help="what the tree holds")
    parser.add_argument("--out", type=Path, help="TOML file to merge into")
    parser.add_argument("--only", default="", help="measure only scenarios whose id contains this")
    parser.add_argument("--missing", action="store_true", help="measure only what the file has no row of")
    parser.add_argument("--date", default="", help="date to write into the rows")
    parser.add_argument("--show", action="store_true", help="print what every rank saw")
    options = parser.parse_args(arguments)
    known = _rows(options.out).keys() if options.out and options.missing else ()
    chosen = [each for each in planned(options.release) if options.only in each.id and each.id not in known]
    with launch.work_folder() as work:
        harness = Harness(options.tree, work)
        for each in chosen:
            row = _measure(harness, options.tree, each, options.date, options.show)
            if options.out:
                merge(options.out, [row])


def _measure(harness: Harness, tree: Path, what: Planned, date: str, show: bool) -> MeasuredRow:
    trees = (tree_at(tree, what.scenario.release),) * 2

    def run(completion_delay_s: float = 0.0) -> Observed:
        return observe(harness, what.scenario, trees, completion_delay_s)

    runs = [run()]
    if runs[0].seen.stalled:  # a busy machine can look like a standstill, but hardly twice
        runs = [run()]
    race = runs[0].race
    if race is OVERWRITTEN:
        runs += [run() for _ in range(_REPEATS_OF_A_RACE - 1)]
        race = None if _never_right([each.result for each in runs]) else race
    if what.scenario.mode == "read" and runs[0].seen.record.history.events("told"):
        runs += [run(_SLOW_S)]
        prompt, slow = (_quantities(each.result) for each in runs)
        if (prompt["coverage"], prompt["wrong"]) == (slow["coverage"], slow["wrong"]):
            runs.pop()
        else:
            race = NO_BARRIER
    row = _row(what, [each.result for each in runs], race, date)
    seen = runs[0].seen
    print(f"{what.id}: {json.dumps(row['expect'])} {[round(each.seen.seconds, 1) for each in runs]}", flush=True)
    for raised in seen.raised:
        print(f"    {raised}", flush=True)
    if seen.stalled:
        print(f"    stalled: {seen.stalled}", flush=True)
    if show:
        for part in (*seen.record.courses, *seen.ranks):
            print(f"    {part}", flush=True)
    return row


def _quantities(result: Result) -> MeasuredRow:
    """What a row may state of a run; numbers are by decode rank that has a request."""
    ranks = [rank for rank in result.by_rank if rank.coverage is not None]
    return {
        "coverage": [rank.coverage for rank in ranks],
        "wrong": [rank.wrong for rank in ranks],
        "covered_plus_wrong": [(rank.coverage or 0.0) + (rank.wrong or 0.0) for rank in ranks],
        "coverage_end": [rank.coverage_end for rank in ranks],
        "told": result.sets.told,
        "written": result.sets.written,
        "prefill_told": result.sets.prefill_told,
        "prefill_released": result.sets.prefill_released,
        "outcome": result.outcome,
    }


def _row(what: Planned, results: Sequence[Result], race: Unsteady | None, date: str) -> MeasuredRow:
    """State what all repeats agree on, but for what the race decides."""
    first, *others = map(_quantities, results)
    stated = [*_ALWAYS, *(race.instead if race else ())]
    omitted = race.omit if race else ()
    expect = {
        name: first[name]
        for name in _FIELDS
        if name in stated and name not in omitted and all(each[name] == first[name] for each in others)
    }
    row = {"id": what.id, **_inputs(what.scenario), "expect": expect}
    if race:
        row["race"] = race.why
    return row | {"origin": "real connector", "date": date}


def _never_right(runs: Sequence[Result]) -> bool:
    """Whether no order of the writers makes a cell right: all repeats agree, nothing is covered and bytes went astray.

    Then the writers' layout doesn't fit the reader's, and whoever is last leaves a wrong cell.
    """
    same = all(run.by_rank == runs[0].by_rank for run in runs)
    return same and bool(runs[0].stray) and not runs[0].coverage


def _inputs(scenario: Scenario) -> MeasuredRow:
    """A scenario as rows tell it: what all of them have in common is left out."""

    def engine(side: Side) -> MeasuredRow:
        return {"tp": side.tp, "dp": side.dp} | _unusual(side, _ENGINE)

    assert isinstance(scenario.requests, tuple)
    return {
        "release": scenario.release,
        "mode": scenario.mode,
        "prefill": engine(scenario.prefill),
        "decode": engine(scenario.decode),
        "model": scenario.model,
        "block_size": scenario.block_size,
        "prompt_tokens": scenario.prompt_tokens,
        "prefill_num_blocks": scenario.prefill.num_blocks,
        "decode_num_blocks": scenario.decode.num_blocks,
        "requests": [_unusual(request, _REQUEST) for request in scenario.requests],
        "router": scenario.router,
        "faults": list(scenario.faults),
    }


def _unusual(part: Side | RequestSpec, names: Sequence[str]) -> MeasuredRow:
    """Those fields that are not as usual, in this order."""
    given: MeasuredRow = msgspec.to_builtins(part)
    return {name: given[name] for name in names if name in given}


def merge(path: Path, rows: Sequence[MeasuredRow]) -> None:
    """Put `rows` into the file in place of those with the same id, in the order of the plan."""
    known = _rows(path) | {row["id"]: row for row in rows}
    order = [each.id for release in PUBLISHED for each in planned(release)]
    position = {identifier: index for index, identifier in enumerate(order)}
    kept = sorted((row for row in known.values() if row["id"] in position), key=lambda row: position[row["id"]])
    text = _HEADER + "".join("\n[[row]]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in row.items()) for row in kept)
    scratch = path.with_suffix(".partial")
    scratch.write_text(text)
    scratch.replace(path)


def _rows(path: Path) -> dict[str, MeasuredRow]:
    """The rows of a file by id, none if there is none. Exits if another harness measured them."""
    text = path.read_text() if path.exists() else _HEADER
    if not text.startswith(_HEADER):
        raise SystemExit(f"{path}: was measured by another harness; name another file")
    return {row["id"]: row for row in tomllib.loads(text).get("row", ())}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(round(value, 6))
    return json.dumps(value)


if __name__ == "__main__":
    main()
