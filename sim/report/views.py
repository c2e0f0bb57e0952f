"""The tables of a report, as data that the page, the picture and the Markdown show: which runs stand where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvcover.sim.errors import InputError
from kvcover.sim.report.gather import Material, Run
from kvcover.sim.results.regress import Change, change, pairing, scenario_fields
from kvcover.sim.results.result import GOOD, OUTCOMES, Result, raced
from kvcover.sim.search.compat import Cell, cell_of, pairing_of

_OWN = ("model", "router", "faults")  # told by themselves


class Setting(msgspec.Struct, frozen=True):
    """What the pairings of one map have in common. `ran` is what may differ between two maps that are put side by side.

    `others` are fields of the scenario that are not as usual, as `name=value`.
    """

    ran: str
    mode: str
    model: str
    router: str
    faults: tuple[str, ...]
    others: tuple[str, ...]

    def beside(self) -> Setting:
        """The same without what ran."""
        return msgspec.structs.replace(self, ran="")


def setting_of(result: Result) -> Setting:
    """The setting of a result. The toy proxy comes with the release, so it is one router, whatever its version."""
    scenario = result.scenario or {}
    fields = scenario_fields(scenario)
    faults = fields.get("faults")
    others = [f"{name}={_text(value)}" for name, value in fields.items() if name not in _OWN and value not in ({}, [])]
    return Setting(
        ran=ran(result),
        mode=result.mode,
        model=result.model,
        router=result.router if result.scenario is None or "router" in fields else "toy-proxy",
        faults=tuple(map(_text, faults)) if isinstance(faults, list) else tuple(each.fault for each in result.faults),
        others=tuple(sorted(others)),
    )


def ran(result: Result) -> str:
    """Which connector: releases, policies exchanged, and the tier if it is a real one."""
    text = result.release if result.decode_release == result.release else f"{result.release} → {result.decode_release}"
    overrides = (result.scenario or {}).get("overrides")
    exchanged = [f"{field}={policy}" for field, policy in overrides.items()] if isinstance(overrides, dict) else []
    return ", ".join([text, *exchanged, *([f"{result.tier} tier"] if result.tier != "model" else [])])


def pair_of(result: Result) -> tuple[int, int]:
    """TP sizes of prefill and decode."""
    return result.prefill["tp"], result.decode["tp"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Heat(msgspec.Struct, frozen=True):
    """A map of TP pairings of one setting: prefill TP sizes down, decode TP sizes across."""

    setting: Setting
    runs: dict[tuple[int, int], Run]

    @property
    def rows(self) -> list[int]:
        return sorted({prefill for prefill, _ in self.runs})

    @property
    def columns(self) -> list[int]:
        return sorted({decode for _, decode in self.runs})

    @property
    def said(self) -> str:
        """Outcomes, the commonest first."""
        return tally(self.runs.values())


def tally(runs: Iterable[Run]) -> str:
    """`12 ok (4 with a race), 4 hang`: outcomes from best to worst."""
    found = list(runs)
    counts, races = Counter(run.result.outcome for run in found), sum(_lucky(run.result) for run in found)
    said = [f"{counts[name]} {name}" for name in (*OUTCOMES, "vacuous") if counts[name]]
    return ", ".join([*said, *([f"{races} of them with a race"] if races else [])])


def _lucky(result: Result) -> bool:
    return result.outcome in GOOD and raced(result.checks)


def heats_of(runs: Sequence[Run]) -> list[Heat]:
    """All runs but those of the corpus as maps, in order. Where two runs are of one cell, the second opens another map."""
    maps: dict[Setting, list[Heat]] = {}
    for run in runs:
        if run.report:
            continue
        alike = maps.setdefault(setting_of(run.result), [])
        place = pair_of(run.result)
        heat = next((each for each in alike if place not in each.runs), None)
        if heat is None:
            alike.append(heat := Heat(setting_of(run.result), {}))
        heat.runs[place] = run
    return [heat for alike in maps.values() for heat in alike]


class Beside(msgspec.Struct, frozen=True):
    """One setting on several releases (or tiers): pairings that are not the same on all of them, and how many are."""

    setting: Setting
    columns: list[str]
    rows: list[tuple[tuple[int, int], list[Run | None]]]
    alike: int


def releases_beside(heats: Sequence[Heat]) -> list[Beside]:
    """Settings that ran on more than one release, or more than once, pairing by pairing."""
    found: dict[Setting, dict[str, Heat]] = {}
    for heat in heats:
        columns, name = found.setdefault(heat.setting.beside(), {}), heat.setting.ran
        again = sum(each.setting.ran == name for each in columns.values())
        columns[f"{name} ({again + 1})" if again else name] = heat
    tables = []
    for setting, by_release in found.items():
        if len(by_release) < 2:
            continue
        pairs = dict.fromkeys(pair for heat in by_release.values() for pair in heat.runs)
        rows = [(pair, [heat.runs.get(pair) for heat in by_release.values()]) for pair in pairs]
        differ = [row for row in rows if len({_seen(run) for run in row[1]}) > 1]
        tables.append(Beside(setting, list(by_release), differ, len(rows) - len(differ)))
    return tables


def _seen(run: Run | None) -> tuple[Any, ...]:
    return () if run is None else (run.result.outcome, round(run.result.coverage, 9), raced(run.result.checks))


def routers_of(material: Material, heats: Sequence[Heat]) -> list[Cell]:
    """Router × release × mode: as `kvcover compat` wrote it, and of maps without faults that differ in nothing but routers."""
    found = list(material.routers)
    by_setting: dict[Setting, list[Heat]] = {}
    for heat in heats:
        if not heat.setting.faults:
            by_setting.setdefault(msgspec.structs.replace(heat.setting, router=""), []).append(heat)
    for alike in by_setting.values():
        if len({heat.setting.router for heat in alike}) > 1:
            for heat in alike:
                pairings = [pairing_of(run.result, run.result.replay) for run in heat.runs.values()]
                found.append(cell_of(heat.setting.router, heat.setting.ran, heat.setting.mode, pairings))
    return found


class Faulty(msgspec.Struct, frozen=True):
    """One setting with planned faults: how many of its runs they fired in, and what came of the same runs without them."""

    setting: Setting
    fired: int
    runs: list[Run]
    without: list[Run]


def faults_of(heats: Sequence[Heat]) -> list[Faulty]:
    """Every map with planned faults."""
    sound = {heat.setting: heat for heat in reversed(heats) if not heat.setting.faults}
    found = []
    for heat in heats:
        if heat.setting.faults:
            other = sound.get(msgspec.structs.replace(heat.setting, faults=()))
            runs = list(heat.runs.values())
            fired = sum(all(each.fired for each in run.result.faults) for run in runs)
            without = [other.runs[pair] for pair in heat.runs if pair in other.runs] if other else []
            found.append(Faulty(heat.setting, fired, runs, without))
    return found


class Report(msgspec.Struct, frozen=True):
    """A public report of the corpus, release by release."""

    name: str
    runs: dict[str, Run]


def reports_of(runs: Sequence[Run]) -> tuple[list[str], list[Report]]:
    """Releases, and the reports that were run on them."""
    found: dict[str, Report] = {}
    for run in runs:
        if run.report:
            found.setdefault(run.report, Report(run.report, {})).runs.setdefault(ran(run.result), run)
    columns = dict.fromkeys(release for report in found.values() for release in report.runs)
    return sorted(columns, key=_in_order), list(found.values())


def _in_order(release: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in release.split(".")]


class Changed(msgspec.Struct, frozen=True):
    """A run beside the same run of a baseline; `before` is None if the baseline lacks it."""

    run: Run
    before: Run | None
    change: Change

    @property
    def kind(self) -> str:
        """The word for it: worse before unclear before better."""
        if self.before is None:
            return "not in the baseline"
        for name in ("worse", "unclear", "better", "otherwise"):
            if getattr(self.change, name):
                return {"unclear": "can't be told", "otherwise": "as bad, but otherwise"}.get(name, name)
        return "same"

    @property
    def reasons(self) -> list[str]:
        return [*self.change.worse, *self.change.unclear, *self.change.better, *self.change.otherwise]


def changes(runs: Sequence[Run], baseline: Sequence[Run]) -> tuple[list[Changed], list[Run]]:
    """Every run beside that of the baseline: of the same release if there is one, else of the only one; and what is only there.

    Raises InputError if the baseline has several runs of a scenario, and none on the same release.
    """
    known: dict[Any, list[Run]] = {}
    for run in baseline:
        known.setdefault(_same(run), []).append(run)
    found: list[Changed] = []
    met: set[int] = set()
    for run in runs:
        before = _before(run, known.get(_same(run), []))
        met |= set() if before is None else {before.number}
        found.append(Changed(run, before, Change() if before is None else change(before.result, run.result)))
    return found, [run for run in baseline if run.number not in met]


def _before(run: Run, there: list[Run]) -> Run | None:
    same = [each for each in there if ran(each.result) == ran(run.result)]
    if len(same or there) > 1:
        what = "on the same release" if same else "on " + " and ".join(dict.fromkeys(ran(each.result) for each in there))
        cell = pairing(run.result.mode, *pair_of(run.result))
        raise InputError("--baseline", f"holds {len(same or there)} runs like {cell}, {what}", "give one of each")
    return next(iter(same or there), None)


def _same(run: Run) -> Any:
    return setting_of(run.result).beside(), pair_of(run.result), run.report


Layers = list[tuple[str, list[float | None]]]


def layers_of(result: Result) -> Layers:
    """Coverage by layer and decode rank: neighbouring layers that are alike at every rank are one column, `0–60`."""
    by_rank = [rank.by_layer for rank in result.by_rank]
    count = max((len(each) for each in by_rank if each), default=0)
    columns: list[tuple[int, int, list[float | None]]] = []
    for layer in range(count):
        values = [None if not each or layer >= len(each) else each[layer] for each in by_rank]
        if columns and columns[-1][2] == values:
            columns[-1] = (columns[-1][0], layer, values)
        else:
            columns.append((layer, layer, values))
    return [(f"{first}–{last}" if last > first else f"{first}", values) for first, last, values in columns]
