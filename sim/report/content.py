"""What every form of a report shows: the tables by section, and the words in which they are told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import DictLoader, Environment, StrictUndefined, Template

from kvcover import __version__
from kvcover.sim.report.gather import Material, Run
from kvcover.sim.report.views import (
    Changed,
    Heat,
    changes,
    faults_of,
    heats_of,
    layers_of,
    pair_of,
    ran,
    releases_beside,
    reports_of,
    routers_of,
    tally,
)
from kvcover.sim.results.chains import span
from kvcover.sim.results.result import GOOD, MEANING, Check, RankCoverage, Remedies, Result, caught, raced
from kvcover.sim.results.show import fraction
from kvcover.sim.search.compat import Cell

MARKS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
_SAID = {"pass": "good", "fail": "not good", "inconclusive": "inconclusive"}


class RouterTable(msgspec.Struct, frozen=True):
    """Router × release of one mode."""

    columns: list[str]
    rows: dict[str, dict[str, Cell]]


def content(material: Material, baseline: Sequence[Run] = ()) -> dict[str, Any]:
    """The variables of a template. `baseline` are runs to compare with; none: there is no such section."""
    heats = heats_of(material.runs)
    maps: dict[str, list[Heat]] = {}
    for heat in heats:
        if len(heat.runs) > 1:
            maps.setdefault(heat.setting.ran, []).append(heat)
    changed, gone = changes(material.runs, baseline) if baseline else ([], [])
    report_columns, reports = reports_of(material.runs)
    shown: dict[str, Any] = {
        "confirmed": material.confirmed,
        "changed": changed,
        "maps": maps,
        "beside": releases_beside(heats),
        "routers": _by_mode(routers_of(material, heats)),
        "faults": faults_of(heats),
        "reports": reports,
        "explored": material.explored,
        "singles": [run for heat in heats if len(heat.runs) == 1 for run in heat.runs.values()],
    }
    return shown | {
        "gone": gone,
        "report_columns": report_columns,
        "title": _title_of(material),
        "places": material.places,
        "sections": [(anchor, name) for key, (anchor, name) in _SECTIONS.items() if shown[key]],
        "meaning": MEANING,
        "outcomes": [name for name in MEANING if any(run.result.outcome == name for run in material.runs)],
        "version": __version__,
    }


_SECTIONS = {
    "confirmed": ("confirmed", "Did the fix help?"),
    "changed": ("baseline", "Differences from the baseline"),
    "maps": ("pairings", "TP pairings"),
    "beside": ("releases", "Release against release"),
    "routers": ("routers", "Router × release"),
    "faults": ("faults", "Faults"),
    "reports": ("reports", "Public reports"),
    "explored": ("explored", "Explored"),
    "singles": ("runs", "Runs"),
}


def _title_of(material: Material) -> str:
    """What was found, in one line."""
    parts = []
    if runs := material.runs:
        counts: Counter[str] = Counter(run.verdict.status for run in runs)
        told = ", ".join(f"{counts[status]} {said}" for status, said in _SAID.items() if counts[status])
        parts.append(f"{len(runs)} run{'s' * (len(runs) > 1)}: {told}")
    if material.routers:
        parts.append(f"{len(material.routers)} pairs of router and release, by mode")
    parts += [f"{each.runs} runs explored, {each.failures} of them failures" for each in material.explored]
    return "; ".join(parts)


def _outcome(run: Run) -> str:
    return run.result.outcome + (", race" if run.result.outcome in GOOD and raced(run.result.checks) else "")


def _title(result: Result) -> str:
    prefill, decode = pair_of(result)
    dps = [f" DP{size['dp']}" if size["dp"] > 1 else "" for size in (result.prefill, result.decode)]
    return f"{result.mode.upper()} P TP{prefill}{dps[0]} → D TP{decode}{dps[1]}, vLLM {ran(result)}"


def _ranks(names: list[str]) -> str:
    return span(names) if all(len(name) < 16 for name in names) else ", ".join(names)


def _rank(rank: RankCoverage, result: Result) -> str:
    return f"D{rank.dp}.{rank.tp}" if result.decode["dp"] > 1 else f"D{rank.tp}"


def _went(result: Result) -> bool:
    """Whether decode used its cells, so that coverage is that at go."""
    return any(check.name == "coverage-at-go" and check.verdict != "unknown" for check in result.checks)


def _verdicts(checks: list[Check], verdict: str) -> list[Check]:
    return [check for check in checks if check.verdict == verdict]


def _counted(words: list[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _kinds(changed: list[Changed]) -> str:
    """`2 worse, 14 same`."""
    order = ("worse", "can't be told", "better", "as bad, but otherwise", "same", "not in the baseline")
    return _counted(sorted((each.kind for each in changed), key=order.index))


def _by_mode(found: list[Cell]) -> dict[str, RouterTable]:
    tables: dict[str, RouterTable] = {}
    for cell in found:
        table = tables.setdefault(cell.mode, RouterTable([], {}))
        if cell.release not in table.columns:
            table.columns.append(cell.release)
        table.rows.setdefault(cell.router, {})[cell.release] = cell
    return tables


def shade(coverage: float | None) -> str:
    """The class of a colour; full is full only if nothing is missing, and 0 only if all is."""
    if coverage is None:
        return "none"
    return "full" if coverage == 1 else "c0" if coverage == 0 else f"c{min(max(int(coverage * 10), 1), 9)}"


def _word(kind: str) -> str:
    """The class of a kind of change."""
    return "unclear" if kind == "can't be told" else re.sub("[^a-z]+", "-", kind)


FILTERS: dict[str, Any] = {
    "fraction": fraction,
    "mark": lambda run: MARKS[run.verdict.status],
    "said": lambda run: _SAID[run.verdict.status],
    "outcome": _outcome,
    "title": _title,
    "ran": ran,
    "tally": tally,
    "ranks": _ranks,
    "rank": _rank,
    "went": _went,
    "layers": layers_of,
    "raised": caught,
    "remedies": lambda result: isinstance(result.remedies, Remedies),
    "verdicts": _verdicts,
    "counted": _counted,
    "kinds": _kinds,
    "word": _word,
}
"""How a template says things."""


def template(name: str, finalize: Callable[[Any], Any], filters: dict[str, Any]) -> Template:
    """One of the package's templates. Whatever it is filled with is escaped, after `finalize` has made it fit to be shown."""
    environment = Environment(
        loader=DictLoader({name: own(name)}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= FILTERS | filters
    return environment.get_template(name)


def own(name: str) -> str:
    """A file of this package."""
    return files("kvcover.sim.report").joinpath(name).read_text(encoding="utf-8")
