"""The corpus as a gate: each case by name, its verdict alone, and beside a baseline that ran the same cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from kvcover.sim.errors import InputError, TierError
from kvcover.sim.results.gate import Cell, cells_of
from kvcover.sim.results.read import read_rows, result_of
from kvcover.sim.results.regress import refuse_other_scenario
from kvcover.sim.results.result import Result
from kvcover.sim.search.baseline import run_beside
from kvcover.sim.search.corpus import Case, Judged, able, judge
from kvcover.sim.tiers import Tier

Found = dict[str, Result | TierError]


class CorpusRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of some cases, by name; `skipped` are those whose faults the tier can't inject, with the reason."""

    cases: Mapping[str, Case]
    now: Found
    before: Found | None
    skipped: Mapping[str, str]

    @property
    def judged(self) -> list[Judged]:
        """Those that ran, each with whether it is as expected."""
        return [judge(self.cases[name], result) for name, result in self.now.items() if isinstance(result, Result)]

    def cells(self) -> list[Cell]:
        """Each with its verdict: as the corpus expects, or no worse than the baseline."""
        return cells_of(self.now, self.before, lambda name, result: judge(self.cases[name], result).verdict, self.skipped)


def named(cases: Sequence[Case]) -> dict[str, Case]:
    """Cases by name, which tells the release only where there are several."""
    several = len({case.release for case in cases}) > 1
    return {case.name if several else case.of_any_release: case for case in cases}


def run_corpus(wanted: Sequence[Case], tier: Tier, vllm: str | None, release: str | None, stored: Found | None) -> CorpusRun:
    """Run cases on a tier, and on a baseline's `release` too if one is named; `stored` is a baseline that ran before."""
    ours = {id(case) for case in able(wanted, tier)}
    cases = {name: case for name, case in named(wanted).items() if id(case) in ours}
    skipped = {name: f"tier {tier.name} can't inject their faults" for name in named(wanted) if name not in cases}
    scenarios = [case.scenario for case in cases.values()]
    beside = [] if release is None else [replace(each, release=release) for each in scenarios]
    now, stock = run_beside(tier, scenarios, vllm, beside)
    before = stored if release is None else dict(zip(cases, stock, strict=True))
    return CorpusRun(cases=cases, now=dict(zip(cases, now, strict=True)), before=before, skipped=skipped)


def read_baseline(path: str, wanted: Sequence[Case], tier: Tier) -> Found:
    """What `kvcover corpus -o FILE` wrote, by case. Raises InputError if it is of other cases, scenarios or another tier."""
    cases, hint = named(wanted), "give what `kvcover corpus --release R -o FILE` wrote"
    found: Found = {}
    for number, row in enumerate(read_rows(path), 1):
        place, said = f"{path}: result {number}", row.get("corpus")
        if not isinstance(said, dict) or not isinstance(said.get("report"), str) or not isinstance(said.get("variant"), str):
            raise InputError(place, "is of no report of the corpus", hint)
        name = f"{said['report']} {said['variant']}".strip()
        if name in found:
            raise InputError(path, f"holds two results of {name}", hint)
        result = result_of(row, place)
        if name in cases:
            refuse_other_scenario(path, name, result, tier.name, cases[name].scenario)
        found[name] = result
    if not set(found) & set(cases):
        raise InputError(path, f"has no result of {next(iter(cases))}", hint)
    return found
