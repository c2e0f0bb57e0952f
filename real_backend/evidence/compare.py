"""Two results side by side, or two files of many, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcover.sim.errors import InputError
from kvcover.sim.results.read import read_rows, result_of
from kvcover.sim.results.regress import pairing
from kvcover.sim.results.result import Result

_FIELDS = ("tier", "release", "decode_release", "mode", "model", "router", "prefill", "decode", "outcome", "coverage",
           "by_request", "coverage_end", "wrong", "stray")  # fmt: skip
_SETS = ("needed", "written", "told", "prefill_told", "prefill_released")
WHAT_RAN = ("tier", "release", "decode_release", "router", "findings")


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that both results say. A field that one of them can't know is no difference."""

    name: str
    first: Any
    second: Any

    @property
    def differs(self) -> bool:
        """Whether they disagree."""
        if self.first is None or self.second is None:
            return False
        if isinstance(self.first, float) or isinstance(self.second, float):
            return bool(abs(self.first - self.second) > 1e-9)
        return bool(self.first != self.second)


def read_named(place: str) -> dict[str, Result]:
    """The results in a file, by what tells them apart: a matrix's cell, or a report of the corpus and its release.

    Raises InputError for a file that holds none, or two of one name.
    """
    found: dict[str, Result] = {}
    rows = read_rows(place)
    for number, row in enumerate(rows, 1):
        result = result_of(row, place if len(rows) == 1 else f"{place}: result {number}")
        name = pairing(result.mode, result.prefill["tp"], result.decode["tp"])
        if isinstance(said := row.get("corpus"), dict):
            name = f"{said.get('report')} {said.get('variant') or ''}".strip() + f", {result.release}"
        if name in found:
            raise InputError(place, f"holds two results of {name}", "give what one command wrote")
        found[name] = result
    return found


def compare(first: Result, second: Result) -> list[Line]:
    """Everything that two results say, in order."""
    return list(_lines(first.to_dict(), second.to_dict()))


def seen(lines: list[Line]) -> list[Line]:
    """Those that differ in what was seen, and not only in what ran or how it is told."""
    return [line for line in lines if line.differs and line.name not in WHAT_RAN]


def _lines(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Line]:
    for name in _FIELDS:
        yield Line(name, first.get(name), second.get(name))
    for name in _SETS:
        yield Line(name, first["sets"].get(name), second["sets"].get(name))
    ranks = [{(rank["dp"], rank["tp"]): rank for rank in result["by_rank"]} for result in (first, second)]
    for dp, tp in sorted(set(ranks[0]) | set(ranks[1])):
        one, two = (each.get((dp, tp), {}) for each in ranks)
        for field in ("coverage", "wrong", "told"):
            yield Line(f"D{dp}.{tp} {field}", one.get(field), two.get(field))
    fired = [{each["fault"]: each["fired"] for each in result.get("faults", ())} for result in (first, second)]
    for fault in dict.fromkeys([*fired[0], *fired[1]]):
        yield Line(f"fired {fault}", *(bool(each[fault]) if fault in each else None for each in fired))
    verdicts = [{each["name"]: each["verdict"] for each in result.get("checks", ())} for result in (first, second)]
    for check in dict.fromkeys([*verdicts[0], *verdicts[1]]):
        yield Line(check, *(None if (told := each.get(check)) == "unknown" else told for each in verdicts))
    kinds = [sorted({finding["kind"] for finding in result.get("findings", ())}) for result in (first, second)]
    yield Line("findings", *kinds)
