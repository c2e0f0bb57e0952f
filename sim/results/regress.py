"""What became worse: a run beside the same run of a baseline, for those who gate a branch whose baseline is not all good.

Better is said and never fails. What a tier could not see on one of both sides is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvcover.sim.errors import InputError, short
from kvcover.sim.results.result import GOOD, OUTCOMES, RankCoverage, Result

_EPSILON = 1e-9
_SETS = ("written", "told", "prefill_told", "prefill_released")
# What a baseline may run otherwise: the code under test, and what is expected of it.
_UNDER_TEST = ("release", "decode_release", "overrides", "expect")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How a run differs from its baseline: what is worse, what is better, and what can no longer be told."""

    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


def change(before: Result, now: Result) -> Change:
    """Compare two runs of one scenario. A vacuous run proves nothing, so nothing is said of it but that."""
    if now.outcome == "vacuous":
        return Change(unclear=("a planned fault never fired, so the run proves nothing",))
    if before.outcome == "vacuous":
        return Change(unclear=("in the baseline a planned fault never fired, so it proves nothing",))
    step = OUTCOMES.index(now.outcome) - OUTCOMES.index(before.outcome)
    told = [*_outcomes(before, now), *_shares(before, now), *_checks(before, now, step < 0)]
    if step >= 0:  # a better outcome may well have told and written fewer: those that it refused
        told += _sets(before, now)
    return Change(
        worse=tuple(text for kind, text in told if kind == "worse"),
        better=tuple(text for kind, text in told if kind == "better"),
        unclear=tuple(text for kind, text in told if kind == "unclear"),
    )


Told = tuple[str, str]


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


def _shares(before: Result, now: Result) -> Iterator[Told]:
    """Coverage of all and of each rank, wrong cells and strays."""
    yield from _share("coverage", before.coverage, now.coverage)
    yield from _share("coverage at the end", before.coverage_end, now.coverage_end)
    yield from _share("wrong", before.wrong, now.wrong, less_is_better=True)
    yield from _share("stray cells", before.stray, now.stray, less_is_better=True)
    ranks = {_rank(rank): rank for rank in before.by_rank}
    for rank in now.by_rank:
        if (old := ranks.get(_rank(rank))) is not None:
            yield from _share(f"coverage of {_rank(rank)}", old.coverage, rank.coverage)
            yield from _share(f"wrong at {_rank(rank)}", old.wrong, rank.wrong, less_is_better=True)


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


def pairing(result: Result) -> str:
    """Which cell of a matrix a result is: `write P4→D8`."""
    return f"{result.mode} P{result.prefill['tp']}→D{result.decode['tp']}"


def by_pairing(results: list[Result], place: str) -> dict[str, Result]:
    """Results of one matrix by cell. Raises InputError if there are two of one, or if they are not of one matrix."""
    cells: dict[str, Result] = {}
    for result in results:
        name = pairing(result)
        if name in cells:
            raise InputError(place, f"holds two results of {name}", "give what one `kvcover matrix -o FILE` wrote")
        cells[name] = result
    for result in results[1:]:
        if (why := unlike(results[0], result)) is not None:
            raise InputError(place, f"its results are not of one matrix: {why}", "give what one `kvcover matrix -o FILE` wrote")
    return cells


def unlike(first: Result, second: Result) -> str | None:
    """In what two runs differ besides what a matrix varies and a baseline may run otherwise; None: in nothing."""
    if first.tier != second.tier:
        return f"{short(first.tier)} tier, not {short(second.tier)}"
    old, new = _scenario_of(first), _scenario_of(second)
    for field in dict.fromkeys([*old, *new]):
        if old.get(field) != new.get(field):
            return f"{field} {short(old.get(field))}, not {short(new.get(field))}"
    return None


def _scenario_of(result: Result) -> dict[str, Any]:
    """The scenario without the cell and without what is under test, flat; only the result's own words if it keeps none."""
    fields: dict[str, Any] = {"model": result.model, "seed": result.seed}
    for name, value in (result.scenario or {}).items():
        if name in _UNDER_TEST or name in ("mode", "schema"):
            continue
        if isinstance(value, Mapping):
            fields |= {f"{name}.{inner}": item for inner, item in value.items() if (name, inner) not in _CELL}
        else:
            fields[name] = value
    return fields


_CELL = (("prefill", "tp"), ("decode", "tp"))


def refuse_other_matrix(place: str, baseline: Mapping[str, Result], now: Mapping[str, Result]) -> None:
    """Raise InputError if a baseline is of another scenario, model or tier, or shares no cell with what was run."""
    if (why := unlike(next(iter(baseline.values())), next(iter(now.values())))) is not None:
        raise InputError(place, f"is no baseline of this matrix: {why}", "write one with the same options and -o FILE")
    if not set(baseline) & set(now):
        raise InputError(
            place, f"is no baseline of this matrix: it has no {next(iter(now))}", "write one with the same --mode and sizes"
        )
