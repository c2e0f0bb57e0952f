"""What `kvcover router check` shows: outcomes by mode and release, keys by leg, and legs that work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from kvcover.faults.params import LEGS
from kvcover.sim.results.show import console, fraction, hanging, outcome_text
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.corpus import spans
from kvcover.sim.search.legs_check import Verdict, Works
from kvcover.sim.search.legs_read import Reading

_SIDES = {"prefill": "P", "decode": "D"}


def show_check(verdicts: Sequence[Verdict], notes: Iterable[str], scenario: Scenario, moved: bool) -> None:
    """Everything on 80 columns; releases in which a thing is the same are named together."""
    out = console()
    sizes = " → ".join(f"{_SIDES[side]} {_size(scenario, side)}" for side in LEGS)
    out.print(f"{sizes}, {scenario.model}; as the model of each release reads them")
    if moved:
        text = "ranks of one DP rank need a host to themselves where TP is above 1, as ports collide; so each has one here (pods)"
        out.print(hanging("! ", text))
    for note in notes:
        out.print(hanging("  ", note))
    _outcomes(verdicts)
    for mode in dict.fromkeys(verdict.mode for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.mode == mode]
        for side in LEGS:
            _leg(mode, side, mine)
    for (mode, _), same in groupby(verdicts, key=lambda verdict: (verdict.mode, _told(verdict.works))):
        _works(mode, list(same))


def _size(scenario: Scenario, side: str) -> str:
    engine = getattr(scenario, side)
    dp = f" DP{engine.dp}" if engine.dp > 1 else ""
    return f"TP{engine.tp}{dp}" + (f" on {engine.pods} hosts" if engine.pods > 1 else "")


def _outcomes(verdicts: Sequence[Verdict]) -> None:
    out = console()
    table = Table()
    for column in ("mode", "release", "coverage", "outcome", "first finding"):
        table.add_column(column, overflow="fold")
    for (mode, coverage, outcome, race, why), same in groupby(verdicts, key=_row):
        names = spans(verdict.release for verdict in same)
        table.add_row(mode.upper(), names, coverage, outcome_text(outcome) + Text(", race" if race else ""), why)
    out.print(table)


def _row(verdict: Verdict) -> tuple[str, str, str, bool, str]:
    why = verdict.why[0] if verdict.why else ""
    return verdict.mode, fraction(verdict.coverage), verdict.outcome, verdict.race, why


def _leg(mode: str, side: str, verdicts: Sequence[Verdict]) -> None:
    """Each key of a leg in one paragraph, a clause for each set of releases that treats it alike."""
    out = console()
    filled = ", not given: the toy proxy's" if any(side in verdict.filled for verdict in verdicts) else ""
    out.print(Text(f"{mode.upper()}, {side} leg{filled}", style="bold"))
    readings = {verdict.release: {reading.key: reading for reading in verdict.legs[side]} for verdict in verdicts}
    keys = dict.fromkeys(key for by_key in readings.values() for key in by_key)
    paragraphs: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: not any(by_key[key].sent for by_key in readings.values() if key in by_key)):
        said: dict[str, list[str]] = {}
        for release, by_key in readings.items():
            if key in by_key:
                said.setdefault(_said(by_key[key]), []).append(release)
        alike = len(said) == 1 and len(next(iter(said.values()))) == len(readings)
        clauses = [text if alike else f"{spans(names)}: {text}" for text, names in said.items()]
        paragraphs.setdefault("; ".join(clauses), []).append(key)
    for text, names in paragraphs.items():
        out.print(hanging("  ", f"{', '.join(names)}: {text}"))


def _said(reading: Reading) -> str:
    if not reading.sent:
        return f"not sent, and read: {reading.missing}"
    value = json.dumps(reading.value, ensure_ascii=False)
    value = value if len(value) <= 40 else value[:37] + "..."
    if not reading.read:
        return f"{value} is sent and not read" + (f" (did you mean {reading.near}?)" if reading.near else "")
    kinds: dict[str, list[str]] = {}
    for kind, outcome in reading.worse.items():
        kinds.setdefault(outcome, []).append(kind)
    worse = [f"{outcome} if {' or '.join(names)}" for outcome, names in kinds.items()]
    return f"{value}, read" + (f" ({', '.join(worse)})" if worse else "")


def _told(works: Works | None) -> str:
    return "" if works is None else json.dumps([works.prefill, works.decode])


def _works(mode: str, verdicts: Sequence[Verdict]) -> None:
    """Legs that work for some releases alike, or that nothing does."""
    out = console()
    bad = [verdict for verdict in verdicts if verdict.outcome != "ok"]
    if not bad:
        return
    names, works = spans(verdict.release for verdict in bad), bad[0].works
    out.print(Text(f"{mode.upper()}, {names}: " + ("legs that work" if works else "no legs that work were found"), style="bold"))
    if works is None:
        best = ", ".join(dict.fromkeys(verdict.best for verdict in bad))
        out.print(hanging("  ", f"true sizes, every key that is read, and the toy proxy's legs come to {best} at best"))
        return
    needed = dict.fromkeys(change for verdict in bad if verdict.works for change in verdict.works.needed)
    advised = dict.fromkeys(change for verdict in bad if verdict.works for change in verdict.works.advised if change not in needed)
    for mark, changes in (("needed", needed), ("better, and read by nobody here", advised)):
        for change in changes:
            out.print(hanging("  ", f"{mark}: {change}"))
    legs = {mode: {"prefill": works.prefill, "decode": works.decode}}
    out.print(json.dumps(legs, ensure_ascii=False), soft_wrap=True)
