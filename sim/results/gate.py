"""Many runs by name, each judged alone or beside a baseline: what a gate goes by, and JUnit shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvcover.sim.errors import TierError
from kvcover.sim.results.regress import change
from kvcover.sim.results.result import Result
from kvcover.sim.results.verdict import PASS, Named, Verdict, fail, inconclusive, together, used

Found = Mapping[str, Result | TierError]
Alone = Callable[[str, Result], Verdict]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its verdict. `better` says what it does better than the baseline, `as_before` that it is bad in both.

    `otherwise` has reasons for being as bad that the baseline has not: no verdict, but somebody should look.

    `skipped`: the tier can't run it, which is no verdict at all.
    """

    name: str
    verdict: Verdict
    better: tuple[str, ...] = ()
    as_before: bool = False
    otherwise: tuple[str, ...] = ()
    skipped: bool = False
    seconds: float = 0.0
    replay: str = ""


def cells_of(now: Found, baseline: Found | None, alone: Alone, skipped: Mapping[str, str] | None = None) -> list[Cell]:
    """Judge runs by name: beside those of the baseline, `alone` where there is none or it lacks them.

    What the baseline has and was not run now is inconclusive, as is what the machine could not run.
    """
    out_of_reach = skipped or {}
    cells = [_cell(name, result, baseline, alone) for name, result in now.items()]
    missing = [name for name in baseline or () if name not in now and name not in out_of_reach]
    cells += [Cell(name=name, verdict=inconclusive("it is in the baseline and was not run")) for name in missing]
    return cells + [Cell(name=name, verdict=inconclusive(why), skipped=True) for name, why in out_of_reach.items()]


def verdict_of(cells: list[Cell], what: str) -> Verdict:
    """One verdict of all cells that the tier can run."""
    named: list[Named] = [(cell.name, _short(cell.verdict)) for cell in cells if not cell.skipped]
    return together(named, what)


def _short(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, reasons=(first_of(verdict.reasons),) if verdict.reasons else ())


def _cell(name: str, result: Result | TierError, baseline: Found | None, alone: Alone) -> Cell:
    if isinstance(result, TierError):
        return Cell(name=name, verdict=inconclusive(f"could not be run: {result}"))
    before = None if baseline is None else baseline.get(name)
    better: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    if isinstance(before, TierError):
        verdict = inconclusive(f"the baseline could not be run: {before}")
    elif before is None:
        verdict = alone(name, result)
    else:
        found = change(before, result)
        verdict, better = _beside(found.worse, found.unclear, result), found.better
        otherwise = found.otherwise
    bad = verdict.status != "fail" and before is not None and alone(name, result).status == "fail"
    return Cell(
        name=name, verdict=verdict, better=better, as_before=bad, otherwise=otherwise, seconds=result.seconds, replay=result.replay
    )


def _beside(worse: tuple[str, ...], unclear: tuple[str, ...], result: Result) -> Verdict:
    if worse:
        return fail(*worse)
    if unclear:
        return inconclusive(*unclear)
    if used(result):
        return PASS
    return Verdict("inconclusive", ("no request used what was transferred, as in the baseline",), idle=True)


def first_of(texts: tuple[str, ...]) -> str:
    """The first two, and how many more there are."""
    more = f"; and {len(texts) - 2} more" if len(texts) > 2 else ""
    return "; ".join(texts[:2]) + more
