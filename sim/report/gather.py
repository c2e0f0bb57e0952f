"""What a report is made of: everything that the files hold which `--json` and `-o` write, whichever command wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from kvcover.sim.errors import InputError, short
from kvcover.sim.results.read import read_objects, result_of, sides_of
from kvcover.sim.results.result import Result
from kvcover.sim.results.verdict import Verdict, judge_run
from kvcover.sim.search.compat import Cell

T = TypeVar("T")
MOST_RUNS = 5000
_GOOD = ("CONFIRMED", "PREDICTED")
_HINT = "give what `kvcover` wrote with --json or -o"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One result, its number in the report, and what the judge says of it, whatever its scenario expects.

    `report` is the public report of the corpus whose scenario it is, `as_expected` whether it is what that says.
    """

    number: int
    place: str
    result: Result
    verdict: Verdict
    report: str = ""
    as_expected: bool = True


class ExploredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of an exploration that look alike."""

    outcome: str
    release: str
    mode: str
    kinds: list[str]
    shape: list[str]
    count: int
    name: str
    replay: str


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvcover explore --json` sums up; `ended` says why it ended early, if it did."""

    place: str
    runs: int
    failures: int
    outcomes: dict[str, int]
    groups: list[ExploredGroup]
    passed: int
    ended: str
    digest: str


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvcover confirm` concluded of two runs."""

    place: str
    verdict: str
    reason: str
    before: Run
    after: Run


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read, in order. The two runs of a confirmation are among the runs, too."""

    places: list[str]
    runs: list[Run]
    routers: list[Cell]
    explored: list[Explored]
    confirmed: list[Confirmed]


def gather(places: Sequence[str]) -> Material:
    """Read result files. Raises InputError for what is none, or for more runs than a page can show."""
    found = Material(places=list(places), runs=[], routers=[], explored=[], confirmed=[])
    for place in places:
        rows = read_objects(place)
        for number, row in enumerate(rows, 1):
            _take(found, row, place if len(rows) == 1 else f"{place}: result {number}")
        if len(found.runs) > MOST_RUNS:
            raise InputError(place, f"brings {len(found.runs)} runs", f"a report shows {MOST_RUNS} at most: give fewer files")
    return found


def _take(found: Material, row: dict[str, Any], place: str) -> None:
    if {"works", "pairings", "router"} <= set(row):
        cell = _convert(row, Cell, place)
        good = bool(cell.pairings) and all(pairing.good for pairing in cell.pairings)
        _refuse_contradiction(
            good == (cell.works == "all") == (not cell.worst), place, f"works: {short(cell.works)}", "its pairings"
        )
        found.routers.append(cell)
    elif {"groups", "runs", "failures"} <= set(row):
        explored = _convert(row | {"place": place}, Explored, place)
        failures = sum(group.count for group in explored.groups)
        _refuse_contradiction(failures == explored.failures, place, f"{explored.failures} failures", f"groups of {failures}")
        found.explored.append(explored)
    elif row.get("kind") == "confirmation":
        before, after = (_run(found, side, f"{place}: {side['confirmation']}") for side in sides_of(row, place))
        verdict, reason = (_text(row, name, place) for name in ("verdict", "reason"))
        wanted = "PREDICTED" if before.result.tier == "model" else "CONFIRMED"
        shown = verdict == wanted and before.verdict.status == "fail" and after.verdict.passed
        had = f"{before.result.outcome} before and {after.result.outcome} after on the {before.result.tier} tier"
        _refuse_contradiction(shown or verdict not in _GOOD, place, short(verdict), had)
        found.confirmed.append(Confirmed(place=place, verdict=verdict, reason=reason, before=before, after=after))
    else:
        _run(found, row, place)


def _refuse_contradiction(agree: bool, place: str, one: str, other: str) -> None:
    if not agree:
        raise InputError(place, f"contradicts itself: it says {one}, and has {other}", _HINT)


def _run(found: Material, row: dict[str, Any], place: str) -> Run:
    result = result_of(row, place)
    said = row.get("corpus")
    told = said if isinstance(said, dict) else {}
    report = " ".join(str(told.get(name) or "") for name in ("report", "variant")).strip()
    verdict = _verdict(result, place)
    run = Run(
        number=len(found.runs) + 1, place=place, result=result, verdict=verdict, report=report,
        as_expected=told.get("as_expected") is not False,
    )  # fmt: skip
    found.runs.append(run)
    return run


def _verdict(result: Result, place: str) -> Verdict:
    """What the judge says of a result; raises InputError, which names the place, for a scenario that is none."""
    try:
        return judge_run(result)
    except InputError as error:
        raise InputError(f"{place}: scenario: {error.place}", error.problem, error.hint) from None


def _text(row: dict[str, Any], name: str, place: str) -> str:
    if not isinstance(text := row.get(name), str):
        raise InputError(f"{place}: {name}", f"{short(text)} is no text", _HINT)
    return text


def _convert(row: dict[str, Any], kind: type[T], place: str) -> T:
    """Plain data as a struct. Raises InputError for what does not fit."""
    try:
        return msgspec.convert(row, kind, strict=True)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:
        raise InputError(place, f"is none of kvcover's results: {error}", _HINT) from None
