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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.evidence.all_pairs import Combination, all_pairs
from kvcover.real_backend.evidence.observe import observe, tree_at
from kvcover.real_backend.evidence.plan import GQA2, GQA8, MLA, Planned, scenario_of
from kvcover.sim import launch
from kvcover.sim.releases.records import PUBLISHED
from kvcover.sim.results.agreement import View, differences, view
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.simulate import run

_ATTEMPTS = 3
_HEADS = {"mla": MLA, "gqa8": GQA8, "gqa2": GQA2}
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
class Comparison:
    """What came of one case. `agree`; `varies`: the connector's own runs differ, one as the model says; or `disagree`.

    `differ` maps a field to [model, connector]; `race` says which fields can't be compared, and why.
    """

    id: str
    verdict: str
    differ: dict[str, list[Any]] = field(default_factory=dict)
    race: str = ""
    raised: list[str] = field(default_factory=list)
    seconds: float = 0.0


def releases_of(scenario: Scenario) -> str:
    """One release, or those of prefill and decode."""
    return f"{scenario.release}→{scenario.decode_release}" if scenario.decode_release else scenario.release


def plan() -> list[Planned]:
    """Return the cases, one release after the other, always the same ones.

    All pairs, and once more all pairs without a fault for the releases that changed most and for two releases at a time.
    """
    healthy = {**_FACTORS, "key": ("",)}
    cases = all_pairs(_FACTORS, _fits)
    cases += all_pairs({**healthy, "release": _MOST_CHANGED}, _fits)
    cases += all_pairs({**healthy, "release": _SKEWED}, _fits)
    planned = {each.id: each for each in map(_planned, cases)}
    return sorted(planned.values(), key=lambda each: (bool(each.scenario.decode_release), PUBLISHED.index(each.scenario.release)))


def _fits(case: Combination) -> bool:
    """Leave out DP and TP together on one side: ports collide in every release, and such an engine never starts."""
    return all(tp == 1 or dp == 1 for tp, dp in zip(case.get("tp", ()), case.get("dp", ()), strict=False))


def _planned(case: Combination) -> Planned:
    release, mode, heads, router = case["release"], case["mode"], case["heads"], case["router"]
    own, other = (release, None) if isinstance(release, str) else release
    prefill, decode = ({"tp": tp, "dp": dp} for tp, dp in zip(case["tp"], case["dp"], strict=True))
    faults = (case["key"],) if case["key"] else ()
    requests = max(case["dp"])
    scenario = scenario_of(own, mode, prefill, decode, _HEADS[heads], router, faults, requests, decode_release=other)
    sizes = f"p{prefill['tp']}x{prefill['dp']}d{decode['tp']}x{decode['dp']}"
    return Planned("/".join([releases_of(scenario), mode, sizes, heads, router.replace(" ", "-"), *faults]), scenario)


def model_view(scenario: Scenario) -> tuple[Scenario, View]:
    """What the model says, and of which scenario: a key fault that finds no key changes nothing, and is left out."""
    result = run(scenario)
    if result.outcome == "vacuous":
        scenario = msgspec.structs.replace(scenario, faults=())
        result = run(scenario)
    return scenario, view(result)


def compare(harness: Harness, planned: Planned, trees: Path) -> Comparison:
    """Run a case on the connector, again if it disagrees with the model: a busy machine can look like a timeout."""
    started = time.monotonic()
    scenario, model = model_view(planned.scenario)
    ran = tuple(tree_at(trees / release, release) for release in (scenario.release, scenario.decode_release or scenario.release))
    for attempt in range(_ATTEMPTS):
        observed = observe(harness, scenario, (ran[0], ran[1]))
        race, real = observed.race, view(observed.result)
        now = differences(model, real, race.omit, race.instead) if race else differences(model, real)
        if attempt == 0 or now:
            differ = now
        if not now:
            break
    verdict = "agree" if not differ else "disagree" if now else "varies"
    why = f"{race.why}; not compared: {', '.join(race.omit)}" if race and race.omit else ""
    raised = [f"{each.rank} {each.call}: {each.kind}: {each.text}" for each in observed.seen.raised] if differ else []
    return Comparison(planned.id, verdict, differ, why, raised, round(time.monotonic() - started, 1))


def comparisons(trees: Path, cases: Sequence[Planned]) -> Iterator[Comparison]:
    """Run the cases of one release, or of one pair of them."""
    releases = cases[0].scenario.release, cases[0].scenario.decode_release or cases[0].scenario.release
    prefill, decode = (trees / release for release in releases)
    with launch.work_folder() as work, Harness(prefill, work, decode_tree=decode) as harness:
        for planned in cases:
            yield compare(harness, planned, trees)


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
    todo = [each for each in wanted if each.id not in done]
    with options.record.open("a") as record:
        for releases, group in itertools.groupby(todo, lambda each: releases_of(each.scenario)):
            missing = [release for release in releases.split("→") if not (options.trees / release).is_dir()]
            cases = list(group)
            if missing:
                print(f"{releases}: no tree of {', '.join(missing)}: {len(cases)} cases NOT RUN", file=sys.stderr)
                continue
            for verdict in comparisons(options.trees, cases):
                line = json.dumps(asdict(verdict), ensure_ascii=False)
                print(line, file=record, flush=True)
                print(line, flush=True)
    found = {verdict.id: verdict for verdict in read(options.record)}
    seen = [found[each.id] for each in wanted if each.id in found]
    if options.out:
        options.out.write_text(table(seen))
    return int(any(verdict.verdict == "disagree" for verdict in seen))


def read(record: Path) -> list[Comparison]:
    """Return the verdicts of a record, none if there is no such file."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [Comparison(**json.loads(line)) for line in lines]


def table(found: Sequence[Comparison]) -> str:
    """Return the Markdown page: counts by release, what differs, every case."""
    planned = Counter(releases_of(each.scenario) for each in plan())
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


def _difference(verdict: Comparison) -> str:
    fields = "; ".join(
        f"{each}: model {json.dumps(model)}, connector {json.dumps(real)}" for each, (model, real) in verdict.differ.items()
    )
    return f"- `{verdict.id}`: {fields}"


if __name__ == "__main__":
    sys.exit(main())
