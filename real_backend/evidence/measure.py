"""Measure the table of the real connector: `python -m kvcover.real_backend.evidence.measure --tree TREE --release R --out FILE`.

One process measures one release. Rows that are measured again are replaced, all others stay, so that releases can be
measured in any order. `--only TEXT` restricts to cells whose id contains TEXT; `--show` prints everything that was seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcover.real_backend.driver.case import USUAL_BLOCK_SIZE, CacheForm, CaseResult, Coverage, EngineSize
from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.driver.race import NO_BARRIER, OVERWRITTEN, Race, race_of
from kvcover.real_backend.evidence.plan import Cell, cells
from kvcover.sim.releases.records import PUBLISHED

_HEADER = """\
# Measured with vLLM's own, unmodified MoRI-IO connector, one process a rank, over a stand-in mori.io.
# Written by `python -m kvcover.real_backend.evidence.measure`; do not edit. expect.* is by decode rank in (dp, tp) order;
# coverage is counted at go, or at the end where nothing went. A row with `race` has only what can't differ between runs.
"""
_REPEATS_OF_A_RACE = 4
_SLOW_S = 0.2
_ALWAYS = ("coverage", "wrong", "told", "written", "prefill_told", "prefill_released", "outcome")
_FIELDS = ("coverage", "wrong", "covered_plus_wrong", "coverage_end", *_ALWAYS[2:])
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Observed:
    """The part of a result that a row may state."""

    coverage: tuple[float, ...]
    wrong: tuple[float, ...]
    coverage_end: tuple[float, ...]
    told: tuple[str, ...]
    written: tuple[str, ...]
    prefill_told: tuple[str, ...]
    prefill_released: tuple[str, ...]
    outcome: str

    @property
    def covered_plus_wrong(self) -> tuple[float, ...]:
        """Cells that hold anything."""
        return tuple(covered + wrong for covered, wrong in zip(self.coverage, self.wrong, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m kvcover.real_backend.evidence.measure", description=__doc__)
    parser.add_argument("--tree", type=Path, required=True, help="a vLLM source tree")
    parser.add_argument("--release", choices=PUBLISHED, required=True, help="what the tree holds")
    parser.add_argument("--out", type=Path, help="TOML file to merge into")
    parser.add_argument("--only", default="", help="measure only cells whose id contains this")
    parser.add_argument("--date", default="", help="date to write into the rows")
    parser.add_argument("--show", action="store_true", help="print what every rank saw")
    options = parser.parse_args(arguments)
    chosen = [cell for cell in cells(options.release) if options.only in cell.id]
    with tempfile.TemporaryDirectory(prefix="kvcover-") as work:
        harness = Harness(options.tree, Path(work))
        for cell in chosen:
            row = _measure(harness, cell, options.date, options.show)
            if options.out:
                merge(options.out, [row])


def _measure(harness: Harness, cell: Cell, date: str, show: bool) -> Row:
    results = [harness.run(cell.case())]
    if results[0].stalled:  # a busy machine can look like a standstill, but hardly twice
        results = [harness.run(cell.case())]
    race = race_of(cell.case(), results[0])
    if race is OVERWRITTEN:
        results += [harness.run(cell.case()) for _ in range(_REPEATS_OF_A_RACE - 1)]
        race = None if _never_right(results) else race
    if cell.mode == "read" and any(request.told for request in results[0].requests):
        results += [harness.run(cell.case(_SLOW_S))]
        prompt, slow = (_observe(cell, result) for result in results)
        if (prompt.coverage, prompt.wrong) == (slow.coverage, slow.wrong):
            results.pop()
        else:
            race = NO_BARRIER
    row = _row(cell, results, race, date)
    print(f"{cell.id}: {json.dumps(row['expect'])} {[round(r.seconds, 1) for r in results]}", flush=True)
    for raised in results[0].raised:
        print(f"    {raised}", flush=True)
    if results[0].stalled:
        print(f"    stalled: {results[0].stalled}", flush=True)
    if show:
        for seen in (*results[0].requests, *results[0].ranks):
            print(f"    {seen}", flush=True)
    return row


def _observe(cell: Cell, result: CaseResult) -> _Observed:
    """What ranks saw of all their requests: the mean of their cells; told is who was told of each of them."""
    needed = _needed(cell)
    reached = _reached(cell, result)
    at_go: dict[str, list[Coverage]] = {name: [] for name in needed}
    at_end: dict[str, list[Coverage]] = {name: [] for name in needed}
    untold: set[str] = set()
    for placed, request in zip(cell.case().requests, result.requests, strict=True):
        for tp in range(cell.decode.tp):
            name = cell.decode.rank_name("decode", placed.decode_dp, tp)
            at_go[name].append(request.coverage[tp])
            at_end[name].append(request.at_end[tp])
            untold |= {name} - set(request.told)

    def ordered(names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names))

    return _Observed(
        tuple(fmean(each.covered for each in cells) for cells in at_go.values()),
        tuple(fmean(each.wrong for each in cells) for cells in at_go.values()),
        tuple(fmean(each.covered for each in cells) for cells in at_end.values()),
        ordered(set(needed) - untold),
        tuple(name for name, cells in at_end.items() if any(each.missing < 1 for each in cells) and name in reached),
        ordered({name for request in result.requests for name in request.prefill_told}),
        ordered({name for request in result.requests for name in request.prefill_released}),
        result.outcome,
    )


def _reached(cell: Cell, result: CaseResult) -> set[str]:
    """Return the decode ranks into whose memory some transfer went, right or wrong."""
    names = {rank.name for rank in result.ranks if rank.read_from}
    for key in (key for rank in result.ranks for key in rank.wrote_to):
        tp, dp = (int(part[2:]) for part in key.split(":")[-2:])  # role:host:port:tp<r>:dp<d>
        names.add(cell.decode.rank_name("decode", dp, tp))
    return names


def _needed(cell: Cell) -> list[str]:
    """Return the decode ranks that have a request, in (dp, tp) order."""
    size = cell.decode
    return [size.rank_name("decode", dp, tp) for dp in range(min(size.dp, cell.requests)) for tp in range(size.tp)]


def _same(observed: Sequence[_Observed], name: str) -> Any:
    """Return the value of a field if all repeats agree on it, else None."""
    values = [getattr(each, name) for each in observed]
    return values[0] if all(value == values[0] for value in values) else None


def _row(cell: Cell, results: Sequence[CaseResult], race: Race | None, date: str) -> Row:
    observed = [_observe(cell, result) for result in results]
    expect: Row = {}
    for name in _FIELDS:
        value = _same(observed, name)
        if value is not None and not (race and name in race.omit) and (name in _ALWAYS or (race and name in race.instead)):
            expect[name] = value if isinstance(value, str) else list(value)
    row = _describe(cell) | {"expect": expect}
    if race:
        row["race"] = race.why
    return row | {"origin": "real connector", "date": date}


def _never_right(results: Sequence[CaseResult]) -> bool:
    """Whether no order of the writers makes a cell right: all repeats agree, nothing is covered and bytes went astray.

    Then the writers' layout doesn't fit the reader's, and whoever is last leaves a wrong cell.
    """
    grades = [tuple(request.coverage for request in result.requests) for result in results]
    ranks = [rank for request in grades[0] for rank in request]
    same = all(grade == grades[0] for grade in grades)
    return same and any(rank.stray for rank in ranks) and not any(rank.covered for rank in ranks)


def _describe(cell: Cell) -> Row:
    case = cell.case()

    def size(engine: EngineSize) -> Row:
        usual = CacheForm()
        form = {field.name: getattr(engine.cache, field.name) for field in fields(usual)}
        unusual = {k: v for k, v in form.items() if v != getattr(usual, k)}
        unusual |= {} if engine.hybrid_kv else {"hybrid_kv": False}
        unusual |= {"lookahead_tokens": engine.lookahead_tokens} if engine.lookahead_tokens else {}
        return {"tp": engine.tp, "dp": engine.dp} | unusual

    return {
        "id": cell.id,
        "release": cell.release,
        "mode": cell.mode,
        "prefill": size(cell.prefill),
        "decode": size(cell.decode),
        "model": str(cell.model),
        "block_size": USUAL_BLOCK_SIZE,
        "prompt_tokens": case.prompt_tokens,
        "prefill_num_blocks": cell.prefill.num_blocks,
        "decode_num_blocks": cell.decode.num_blocks,
        "requests": [request.placement() for request in case.requests],
        "router": cell.router,
        "faults": list(cell.faults),
    }


def merge(path: Path, rows: Sequence[Row]) -> None:
    """Put `rows` into the file in place of those with the same id, in the order of the plan."""
    known = {row["id"]: row for row in tomllib.loads(path.read_text())["row"]} if path.exists() else {}
    known |= {row["id"]: row for row in rows}
    order = [cell.id for release in PUBLISHED for cell in cells(release)]
    position = {identifier: index for index, identifier in enumerate(order)}
    kept = sorted((row for row in known.values() if row["id"] in position), key=lambda row: position[row["id"]])
    text = _HEADER + "".join("\n[[row]]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in row.items()) for row in kept)
    scratch = path.with_suffix(".partial")
    scratch.write_text(text)
    scratch.replace(path)


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
