"""Two results side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcover.sim.errors import InputError

_FIELDS = ("tier", "release", "decode_release", "mode", "model", "router", "prefill", "decode", "outcome", "coverage",
           "coverage_end", "wrong", "stray")  # fmt: skip
_SETS = ("needed", "written", "told", "prefill_told", "prefill_released")
_HINT = "give a file that `kvcover run --json -o FILE` wrote"


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


def read_result(place: str) -> dict[str, Any]:
    """The one result in a file. Raises InputError if there is none, or several."""
    try:
        lines = [line for line in Path(place).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(place, f"can't be read: {getattr(error, 'strerror', None) or error}", _HINT) from None
    if len(lines) > 1 and not lines[0].rstrip().endswith("{"):
        raise InputError(place, f"holds {len(lines)} results", "compare single runs")
    try:
        data = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        raise InputError(place, "is not JSON", _HINT) from None
    if not isinstance(data, dict) or not {"schema", "outcome", "coverage", "by_rank", "sets"} <= set(data):
        raise InputError(place, "is no result of kvcover", _HINT)
    if data["schema"] != 1:
        raise InputError(place, f"has schema {data['schema']!r}", "this kvcover reads schema 1")
    return data


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Line]:
    """Everything that two results say, in order."""
    return list(_lines(first, second))


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
    kinds = [sorted({finding["kind"] for finding in result.get("findings", ())}) for result in (first, second)]
    yield Line("findings", *kinds)
