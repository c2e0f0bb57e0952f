"""What became worse: a run beside the same run of a baseline, for those who gate a branch whose baseline is not all good.

Better is said and never fails. What a tier could not see on one of both sides is no difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvcover.sim.errors import InputError, short
from kvcover.sim.results.result import GOOD, OUTCOMES, RankCoverage, Result
from kvcover.sim.scenario.scenario import Scenario

_EPSILON = 1e-9
_SETS = ("written", "told", "prefill_told", "prefill_released")
# What a baseline may run otherwise: the code under test, and what is expected of it.
_UNDER_TEST = ("release", "decode_release", "overrides", "expect")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How a run differs from its baseline: what is worse, what is better, and what can no longer be told.

    `otherwise`: it is as bad as before, and for these reasons that the baseline has not. Which of several comes first may be up
    to timing, so that is no verdict, but somebody should look.
    """

    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()


def change(before: Result, now: Result) -> Change:
    """Compare two runs of one scenario. A vacuous run proves nothing, so nothing is said of it but that."""
    if now.outcome == "vacuous":
        return Change(unclear=("a planned fault never fired, so the run proves nothing",))
    if before.outcome == "vacuous":
        return Change(unclear=("in the baseline a planned fault never fired, so it proves nothing",))
    step = OUTCOMES.index(now.outcome) - OUTCOMES.index(before.outcome)
    told = [*_outcomes(before, now), *_wrongs(before, now), *_checks(before, now, step < 0)]
    if step >= 0:  # a better outcome may well have covered, told and written less: what it refused
        told += [*_coverages(before, now), *_sets(before, now)]
    return Change(
        worse=tuple(text for kind, text in told if kind == "worse"),
        better=tuple(text for kind, text in told if kind == "better"),
        unclear=tuple(text for kind, text in told if kind == "unclear"),
        otherwise=tuple(_otherwise(before, now)),
    )


Told = tuple[str, str]
_DIED = re.compile(r" died: (\w+):")


def _otherwise(before: Result, now: Result) -> Iterator[str]:
    """Reasons of a bad outcome that the same outcome of the baseline has not."""
    if now.outcome == before.outcome and now.outcome not in GOOD:
        known = _reasons(before)
        yield from (f"{reason}, not so in the baseline" for reason in _reasons(now) if reason not in known)


def _reasons(result: Result) -> list[str]:
    """Kinds of finding, those of a crash by the class of what was raised."""
    found = ((each.kind, _DIED.search(each.text) if each.kind == "crash" else None) for each in result.findings)
    return list(dict.fromkeys(f"{kind} by {died[1]}" if died else kind for kind, died in found))


def _outcomes(before: Result, now: Result) -> Iterator[Told]:
    if before.outcome != now.outcome:
        worse = OUTCOMES.index(now.outcome) > OUTCOMES.index(before.outcome)
        yield "worse" if worse else "better", f"outcome {before.outcome} → {now.outcome}"
    if len(before.by_request) != len(now.by_request):
        yield "unclear", f"{len(before.by_request)} requests, now {len(now.by_request)}"
        return
    for index, (old, new) in enumerate(zip(before.by_request, now.by_request, strict=True)):
        if old != new and (old, new) != (before.outcome, now.outcome):
            worse = OUTCOMES.index(new) > OUTCOMES.index(old)
            yield "worse" if worse else "better", f"request {index}: {old} → {new}"


def _coverages(before: Result, now: Result) -> Iterator[Told]:
    """Coverage of all and of each rank."""
    yield from _share("coverage", before.coverage, now.coverage)
    yield from _share("coverage at the end", before.coverage_end, now.coverage_end)
    for name, old, new in _ranks(before, now):
        yield from _share(f"coverage of {name}", old.coverage, new.coverage)


def _wrongs(before: Result, now: Result) -> Iterator[Told]:
    """Wrong cells, of all and of each rank, and strays."""
    yield from _share("wrong", before.wrong, now.wrong, less_is_better=True)
    yield from _share("stray cells", before.stray, now.stray, less_is_better=True)
    for name, old, new in _ranks(before, now):
        yield from _share(f"wrong at {name}", old.wrong, new.wrong, less_is_better=True)


def _ranks(before: Result, now: Result) -> Iterator[tuple[str, RankCoverage, RankCoverage]]:
    known = {_rank(rank): rank for rank in before.by_rank}
    for rank in now.by_rank:
        if (old := known.get(_rank(rank))) is not None:
            yield _rank(rank), old, rank


def _rank(rank: RankCoverage) -> str:
    return f"D{rank.dp}.{rank.tp}"


def _share(name: str, old: float | None, new: float | None, less_is_better: bool = False) -> Iterator[Told]:
    if old is None or new is None or abs(old - new) <= _EPSILON:
        return
    yield "better" if (new < old) == less_is_better else "worse", f"{name} {old:.4g} → {new:.4g}"


def _checks(before: Result, now: Result, outcome_better: bool) -> Iterator[Told]:
    """Checks that passed and fail; where the baseline came to no verdict, a failure counts unless the run went better."""
    known = {check.name: check.verdict for check in before.checks}
    for check in now.checks:
        old = known.get(check.name, "unknown")
        if old == check.verdict:
            continue
        if check.verdict == "fail":
            worse = old == "pass" or not outcome_better
            yield "worse" if worse else "better", f"{check.name}: {old} → fail: {check.reason}"
        elif check.verdict == "unknown" and old == "pass" and now.outcome in GOOD and not outcome_better:
            yield "unclear", f"{check.name}: passed, and is unknown now: {check.reason}"
        elif old == "fail" and check.verdict == "pass":
            yield "better", f"{check.name}: fail → pass"


def _sets(before: Result, now: Result) -> Iterator[Told]:
    for name in _SETS:
        old, new = getattr(before.sets, name), getattr(now.sets, name)
        if old is None or new is None:
            continue
        if lost := [rank for rank in old if rank not in new]:
            yield "worse", f"{name.replace('_', ' ')} no more: {_some(lost)}"


def _some(names: list[str]) -> str:
    return " ".join(names) if len(names) <= 8 else f"{' '.join(names[:8])} and {len(names) - 8} more"


# -- many runs ---------------------------------------------------------------------------------------------------

_HINT = "give what the same command with the same options and -o FILE wrote"


def pairing(mode: str, prefill: int, decode: int) -> str:
    """The name of a matrix's cell: `write P4→D8`."""
    return f"{mode} P{prefill}→D{decode}"


def by_pairing(results: list[Result], place: str) -> dict[str, Result]:
    """Results of one matrix by cell. Raises InputError if there are two of one."""
    cells: dict[str, Result] = {}
    for result in results:
        name = pairing(result.mode, result.prefill["tp"], result.decode["tp"])
        if name in cells:
            raise InputError(place, f"holds two results of {name}", _HINT)
        cells[name] = result
    return cells


def refuse_other_matrix(place: str, baseline: Mapping[str, Result], tier: str, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if a baseline is of another scenario, model or tier, or has no cell of what is to be run."""
    usual = next(iter(scenarios.values()))
    for name, result in baseline.items():
        refuse_other_scenario(place, name, result, tier, scenarios.get(name, usual))
    if not set(baseline) & set(scenarios):
        raise InputError(place, f"has {next(iter(baseline))} and the like, but no {next(iter(scenarios))}", _HINT)


def refuse_other_scenario(place: str, name: str, result: Result, tier: str, scenario: Scenario) -> None:
    """Raise InputError if the result that a baseline has under a name is of another tier or scenario than what is to be run."""
    if result.tier != tier:
        raise InputError(place, f"is of the {result.tier} tier, and this run of the {tier} tier", f"use --tier {result.tier}")
    if result.scenario is None:
        raise InputError(place, f"keeps no scenario of {name}", _HINT)
    kept, fields = scenario_fields(result.scenario), scenario_fields(msgspec.json.decode(msgspec.json.encode(scenario)))
    for field in dict.fromkeys([*kept, *fields]):
        if kept.get(field) != fields.get(field):
            problem = f"has {name} of another scenario: {field} is {_said(kept, field)} there and {_said(fields, field)} here"
            raise InputError(place, problem, _HINT)


def _said(fields: Mapping[str, Any], field: str) -> str:
    return short(fields[field]) if field in fields else "left out"


def scenario_fields(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's fields without the cell of a matrix and without what is under test, flat: `timers.defer_timeout_s`."""
    fields: dict[str, Any] = {}
    for name, value in scenario.items():
        if name in _UNDER_TEST:
            continue
        if isinstance(value, Mapping):
            fields |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            fields[name] = value
    return {name: value for name, value in fields.items() if name not in _CELL}


_CELL = ("schema", "mode", "prefill.tp", "decode.tp")
