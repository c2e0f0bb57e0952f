"""Model against real connector on cases that cover every pair of factors.

Run it with `python -m kvcover.real_backend.evidence.parity --trees DIR --out FILE`.

DIR holds one vLLM source tree a release, named by it. Cases that are in `--record` already are not run again, so that a
long run can go on another day. One import of a release, or of a pair of them, serves all its cases.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcover.real_backend.driver.case import CaseResult, Coverage, EngineSize, ModelShape, RankReport
from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.driver.race import race_of
from kvcover.real_backend.evidence.all_pairs import Case, all_pairs
from kvcover.real_backend.evidence.plan import Cell
from kvcover.sim.releases.records import PUBLISHED
from kvcover.sim.results.agreement import View, differences, view
from kvcover.sim.scenario.scenario import build
from kvcover.sim.simulate import run

_ATTEMPTS = 3
_SHORT_TIMERS = {"transfer_timeout_s": 1.5, "defer_timeout_s": 2.0}
_HEADS = {"mla": ModelShape(layers=2), "gqa8": ModelShape(2, kv_heads=8), "gqa2": ModelShape(2, kv_heads=2)}
_FACTORS: dict[str, Sequence[Any]] = {
    "release": PUBLISHED,
    "tp": ((2, 2), (1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (4, 4), (8, 8), (8, 4), (4, 8)),
    "heads": tuple(_HEADS),
    "mode": ("write", "read"),
    "key": (
        "",
        "drop:remote_tp_size",
        "set:remote_tp_size=1",
        "set:remote_tp_size=1@prefill",
        "set:remote_tp_size=1@decode",
        "set:remote_tp_size=4",
        'set:remote_tp_size="2"',
        "set:remote_tp_size=null",
        "rename:remote_tp_size=tp_size",
        "drop:transfer_id@prefill",
    ),
    "router": ("toy-proxy", "vllm-router 0.1.15", "vllm-router 0.1.16", "vllm-router 0.1.17"),
    "dp": ((1, 1), (1, 2), (2, 1), (2, 2)),
}
_MOST_CHANGED = ("0.26.0", "0.27.0", "0.33.0")
_SKEWED = (("0.26.0", "0.27.0"), ("0.27.0", "0.26.0"), ("0.27.0", "0.33.0"), ("0.33.0", "0.27.0"))
"""Releases of prefill and decode, as in a rolling upgrade."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one case. `agree`; `varies`: the connector's own runs differ, one as the model says; or `disagree`.

    `differ` maps a field to [model, connector]; `race` says which fields can't be compared, and why.
    """

    id: str
    verdict: str
    differ: dict[str, list[Any]] = field(default_factory=dict)
    race: str = ""
    raised: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One case: a cell of prefill's release, and what decode runs."""

    cell: Cell
    decode_release: str

    @property
    def releases(self) -> str:
        """One release, or both."""
        return self.cell.release if self.decode_release == self.cell.release else f"{self.cell.release}→{self.decode_release}"

    @property
    def id(self) -> str:
        """Name all factors."""
        cell = self.cell
        heads = next(label for label, model in _HEADS.items() if model == cell.model)
        sizes = f"p{cell.prefill.tp}x{cell.prefill.dp}d{cell.decode.tp}x{cell.decode.dp}"
        return "/".join([self.releases, cell.mode, sizes, heads, cell.router.replace(" ", "-"), *cell.faults])


def plan() -> list[Planned]:
    """Return the cases, one release after the other, always the same ones.

    All pairs, and once more all pairs without a fault for the releases that changed most and for two releases at a time.
    """
    healthy = {**_FACTORS, "key": ("",)}
    cases = all_pairs(_FACTORS, _fits)
    cases += all_pairs({**healthy, "release": _MOST_CHANGED}, _fits)
    cases += all_pairs({**healthy, "release": _SKEWED}, _fits)
    planned = {each.id: each for each in map(_planned, cases)}
    return sorted(planned.values(), key=lambda each: (each.decode_release != each.cell.release, PUBLISHED.index(each.cell.release)))


def _fits(case: Case) -> bool:
    """Leave out DP and TP together on one side: ports collide in every release, and such an engine never starts."""
    return all(tp == 1 or dp == 1 for tp, dp in zip(case.get("tp", ()), case.get("dp", ()), strict=False))


def _planned(case: Case) -> Planned:
    release = case["release"]
    own, other = (release, release) if isinstance(release, str) else release
    prefill, decode = (EngineSize(tp, dp) for tp, dp in zip(case["tp"], case["dp"], strict=True))
    faults = (case["key"],) if case["key"] else ()
    model, requests = _HEADS[case["heads"]], max(case["dp"])
    return Planned(Cell(own, case["mode"], prefill, decode, model, case["router"], faults, requests), other)


def model_view(planned: Planned) -> View:
    """What the model says of a case, on the same blocks. A key fault that finds no key changes nothing here."""
    result = run(build(_scenario(planned, planned.cell.faults)))
    if result.outcome == "vacuous":
        result = run(build(_scenario(planned, ())))
    return view(result)


def _scenario(planned: Planned, faults: tuple[str, ...]) -> dict[str, Any]:
    cell, case = planned.cell, planned.cell.case()

    def size(engine: EngineSize) -> dict[str, int]:
        return {"tp": engine.tp, "dp": engine.dp, "num_blocks": engine.num_blocks}

    return {
        "release": cell.release,
        "decode_release": planned.decode_release,
        "mode": cell.mode,
        "prefill": size(cell.prefill),
        "decode": size(cell.decode),
        "model": str(cell.model),
        "kv_dtype": "fp32",
        "block_size": cell.decode.cache.block_size,
        "prompt_tokens": case.prompt_tokens,
        "router": cell.router,
        "faults": list(faults),
        "fabric": "loopback",
        "timers": _SHORT_TIMERS,
        "requests": [request.placement() for request in case.requests],
    }


def connector_view(cell: Cell, result: CaseResult) -> View:
    """The same quantities, as seen on the real connector."""
    coverage: dict[str, list[Coverage]] = {}
    at_end: dict[str, list[Coverage]] = {}
    told: dict[str, list[bool]] = {}
    for request, planned in zip(result.requests, cell.case().requests, strict=True):
        for tp in range(cell.decode.tp):
            rank = cell.decode.rank_name("decode", planned.decode_dp, tp)
            coverage.setdefault(rank, []).append(request.coverage[tp])
            at_end.setdefault(rank, []).append(request.at_end[tp])
            told.setdefault(rank, []).append(rank in request.told)
    names = sorted(coverage)
    reached = _reached(cell, result.ranks)
    covered = [fmean(each.covered for each in coverage[rank]) for rank in names]
    wrong = [fmean(each.wrong for each in coverage[rank]) for rank in names]
    return {
        "coverage": covered,
        "wrong": wrong,
        "covered_plus_wrong": [c + w for c, w in zip(covered, wrong, strict=True)],
        "written": [rank for rank in names if rank in reached and any(each.missing < 1 for each in at_end[rank])],
        "told": [rank for rank in names if all(told[rank])],
        "prefill_told": sorted({rank for request in result.requests for rank in request.prefill_told}),
        "prefill_released": sorted({rank for request in result.requests for rank in request.prefill_released}),
        "outcome": result.outcome,
    }


def _reached(cell: Cell, ranks: Sequence[RankReport]) -> set[str]:
    """Return the decode ranks into whose memory some transfer went, right or wrong."""
    names = {rank.name for rank in ranks if rank.read_from}
    for key in (key for rank in ranks for key in rank.wrote_to):
        tp, dp = (int(part[2:]) for part in key.split(":")[-2:])  # role:host:port:tp<r>:dp<d>
        names.add(cell.decode.rank_name("decode", dp, tp))
    return names


def compare(harness: Harness, planned: Planned) -> Verdict:
    """Run a case on the connector, again if it disagrees with the model: a busy machine can look like a timeout."""
    started = time.monotonic()
    cell, model = planned.cell, model_view(planned)
    for attempt in range(_ATTEMPTS):
        result = harness.run(cell.case())
        race = race_of(cell.case(), result)
        real = connector_view(cell, result)
        now = differences(model, real, race.omit, race.instead) if race else differences(model, real)
        if attempt == 0 or now:
            differ = now
        if not now:
            break
    verdict = "agree" if not differ else "disagree" if now else "varies"
    why = f"{race.why}; not compared: {', '.join(race.omit)}" if race and race.omit else ""
    raised = [f"{each.rank} {each.call}: {each.kind}: {each.text}" for each in result.raised] if differ else []
    return Verdict(planned.id, verdict, differ, why, raised, round(time.monotonic() - started, 1))


def verdicts(trees: Path, cases: Sequence[Planned]) -> Iterator[Verdict]:
    """Run the cases of one release, or of one pair of them."""
    prefill, decode = trees / cases[0].cell.release, trees / cases[0].decode_release
    with tempfile.TemporaryDirectory(prefix="kvcover-") as work, Harness(prefill, Path(work), decode_tree=decode) as harness:
        for planned in cases:
            yield compare(harness, planned)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; 1 if anything disagrees."""
    parser = argparse.ArgumentParser(prog="python -m kvcover.real_backend.evidence.parity", description=__doc__)
    parser.add_argument("--trees", type=Path, required=True, help="folder with one vLLM source tree a release")
    parser.add_argument("--out", type=Path, help="Markdown table to write")
    parser.add_argument("--record", type=Path, required=True, help="file of verdicts, one JSON object a line, to go on from")
    parser.add_argument("--only", default="", help="only cases whose id contains this")
    options = parser.parse_args(arguments)
    done = {verdict.id for verdict in read(options.record)}
    wanted = [each for each in plan() if options.only in each.id]
    with options.record.open("a") as record:
        for releases, cases in itertools.groupby((each for each in wanted if each.id not in done), lambda each: each.releases):
            missing = [release for release in releases.split("→") if not (options.trees / release).is_dir()]
            todo = list(cases)
            if missing:
                print(f"{releases}: no tree of {', '.join(missing)}: {len(todo)} cases NOT RUN", file=sys.stderr)
                continue
            for verdict in verdicts(options.trees, todo):
                line = json.dumps(asdict(verdict), ensure_ascii=False)
                print(line, file=record, flush=True)
                print(line, flush=True)
    found = {verdict.id: verdict for verdict in read(options.record)}
    seen = [found[each.id] for each in wanted if each.id in found]
    if options.out:
        options.out.write_text(table(seen))
    return int(any(verdict.verdict == "disagree" for verdict in seen))


def read(record: Path) -> list[Verdict]:
    """Return the verdicts of a record, none if there is no such file."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [Verdict(**json.loads(line)) for line in lines]


def table(found: Sequence[Verdict]) -> str:
    """Return the Markdown page: counts by release, what differs, every case."""
    planned = Counter(each.releases for each in plan())
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    counts = Counter((verdict.id.split("/")[0], verdict.verdict) for verdict in found)
    lines = [
        "# Model and real connector, case by case",
        "",
        f"Written by `python -m kvcover.real_backend.evidence.parity` on {today}; do not edit.",
        f"{len(found)} of {sum(planned.values())} planned cases were run. Together the planned ones contain every pair of",
        "values of release, TP pair, KV heads, mode, key, router and DP sizes, but DP and TP together on one side: ports collide",
        "there and the engine never starts.",
        "A→B: prefill runs A, decode B.",
        "Compared: coverage and wrong by decode rank; ranks written, told; prefill ranks told, released; outcome.",
        "*varies*: repeated runs of the connector differ, one of them is as the model says.",
        "",
        "| release | planned | run | agree | varies | disagree |",
        "|---|---|---|---|---|---|",
    ]
    for release in planned:
        row = [counts[release, verdict] for verdict in ("agree", "varies", "disagree")]
        lines.append(f"| {release} | {planned[release]} | {sum(row)} | {row[0]} | {row[1]} | {row[2]} |")
    for title, verdict in (("Disagreements", "disagree"), ("Runs that vary", "varies")):
        lines += ["", f"## {title}", ""]
        cases = [each for each in found if each.verdict == verdict]
        lines += [_difference(each) for each in cases] or ["None."]
    races = Counter(verdict.race for verdict in found if verdict.race)
    lines += ["", "## Fields left out because the connector's own runs race", ""]
    lines += [f"- {count} cases: {why}" for why, count in sorted(races.items())] or ["None."]
    lines += ["", "## Every case", "", "```", *(f"{each.verdict:8} {each.id}" for each in found), "```"]
    return "\n".join(lines) + "\n"


def _difference(verdict: Verdict) -> str:
    fields = "; ".join(
        f"{each}: model {json.dumps(model)}, connector {json.dumps(real)}" for each, (model, real) in verdict.differ.items()
    )
    return f"- `{verdict.id}`: {fields}"


if __name__ == "__main__":
    sys.exit(main())
