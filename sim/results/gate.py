"""A verdict for each of many runs, alone or beside a baseline, and for all of them: what a gate goes by, and JUnit shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from kvcover.sim.errors import TierError
from kvcover.sim.results.regress import Change, change
from kvcover.sim.results.result import Result

Verdict = Literal["pass", "fail", "inconclusive", "skipped"]
Alone = Callable[[str, Result], tuple[Verdict, str]]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its verdict. `details` are all reasons, of which `reason` names the first, `better` what it does better than
    the baseline; `as_before` says that it is bad in both.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    details: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    as_before: bool = False
    seconds: float = 0.0
    replay: str = ""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """All cells and what they come to: the worst of them, unless together they prove nothing."""

    cells: tuple[Cell, ...]
    verdict: Literal["pass", "fail", "inconclusive"]
    reason: str

    def of(self, verdict: Verdict) -> list[Cell]:
        return [cell for cell in self.cells if cell.verdict == verdict]


def gate(
    now: Mapping[str, Result | TierError],
    baseline: Mapping[str, Result | TierError] | None,
    alone: Alone,
    unproven: Callable[[list[Result]], str],
    skipped: Mapping[str, str] | None = None,
) -> Gate:
    """Judge runs by name: beside those of the baseline, `alone` where there is none or it lacks them.

    A cell of the baseline that was not run now is inconclusive, as is one that the machine could not run. `skipped` are cells
    that the tier can't run, with the reason: they are neither.
    """
    cells = [_cell(name, result, baseline, alone) for name, result in now.items()]
    missing = [name for name in baseline or () if name not in now and name not in (skipped or ())]
    cells += [Cell(name=name, verdict="inconclusive", reason="it is in the baseline and was not run") for name in missing]
    cells += [Cell(name=name, verdict="skipped", reason=why) for name, why in (skipped or {}).items()]
    failed, open_ones = ([cell for cell in cells if cell.verdict == verdict] for verdict in ("fail", "inconclusive"))
    if failed:
        return Gate(cells=tuple(cells), verdict="fail", reason=_told(failed, len(cells)))
    if open_ones:
        return Gate(cells=tuple(cells), verdict="inconclusive", reason=_told(open_ones, len(cells)))
    why = unproven([result for result in now.values() if isinstance(result, Result)])
    return Gate(cells=tuple(cells), verdict="inconclusive" if why else "pass", reason=why)


def _told(cells: Sequence[Cell], count: int) -> str:
    first = cells[0]
    return f"{len(cells)} of {count}{': ' if len(cells) == 1 else ', first '}{first.name}: {first.reason}"


def first_of(texts: Sequence[str]) -> str:
    """The first two, and how many more there are."""
    more = f"; and {len(texts) - 2} more" if len(texts) > 2 else ""
    return "; ".join(texts[:2]) + more


def _cell(name: str, result: Result | TierError, baseline: Mapping[str, Result | TierError] | None, alone: Alone) -> Cell:
    if isinstance(result, TierError):
        return Cell(name=name, verdict="inconclusive", reason=f"could not be run: {result}")
    before = None if baseline is None else baseline.get(name)
    verdict: Verdict
    if isinstance(before, TierError):
        verdict, reason, found = "inconclusive", f"the baseline could not be run: {before}", Change()
    elif before is None:
        (verdict, reason), found = alone(name, result), Change()
    else:
        found = change(before, result)
        verdict = "fail" if found.worse else "inconclusive" if found.unclear else "pass"
        reason = first_of(found.worse or found.unclear)
    bad = verdict == "pass" and before is not None and alone(name, result)[0] != "pass"
    return Cell(
        name=name,
        verdict=verdict,
        reason=reason,
        details=found.worse + found.unclear,
        better=found.better,
        as_before=bad,
        seconds=result.seconds,
        replay=result.replay,
    )
