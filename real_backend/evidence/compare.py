"""Two results side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = ("tier", "release", "decode_release", "mode", "model", "router", "prefill", "decode", "outcome", "coverage",
           "coverage_end", "wrong", "stray")  # fmt: skip
_SETS = ("needed", "written", "told", "prefill_told", "prefill_released")


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
