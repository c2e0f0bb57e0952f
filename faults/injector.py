"""Which planned faults act on what happens: counts, decides, and records that they fired. It knows no tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcover.faults.events import EVENT_KINDS, EventFault
from kvcover.faults.params import KeyFault, Legs, apply_faults

Fault = KeyFault | EventFault


class Injector:
    """All faults of a run. `fired[i]` is how often fault i changed something; 0 at the end makes the run vacuous."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self.fired = [0] * len(self.faults)
        self._seen = [0] * len(self.faults)
        self._written: dict[tuple[int, str], Mapping[str, Any]] = {}  # legs before any fault, for those that copy from one
        self._by_point: dict[str, list[tuple[int, EventFault]]] = {}
        for position, fault in enumerate(self.faults):
            if isinstance(fault, EventFault):
                self._by_point.setdefault(EVENT_KINDS[fault.kind].point, []).append((position, fault))

    def params(
        self, written: Mapping[str, Any], leg: str, request: int, other: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Fault]]:
        """One leg's dictionary after all key faults, and those that fired. The router has `written` it, and the `other` leg."""
        self._written[request, leg] = written
        legs = Legs(written, other, self._written.get((request - 1, leg)))
        keys = [(position, fault) for position, fault in enumerate(self.faults) if isinstance(fault, KeyFault)]
        after, fired = apply_faults([fault for _, fault in keys], legs, leg, request)
        for index in fired:
            self.fired[keys[index][0]] += 1
        return after, [keys[index][1] for index in fired]

    def plans(self, point: str) -> bool:
        """Whether any fault acts at this point, so that a tier need not ask for each event."""
        return point in self._by_point

    def acting(
        self, point: str, target: str, sender: str = "", receiver: str = "", request: int = -1, layer: int = -1, now_ms: float = 0.0
    ) -> list[EventFault]:
        """The faults that act on this event; each counts it as an occurrence, and those that act as fired."""
        acting = []
        for position, fault in self._by_point.get(point, ()):
            if fault.matches(target, sender, receiver, request, layer, now_ms):
                occurrence = self._seen[position]
                self._seen[position] += 1
                if fault.fires_on(occurrence):
                    self.fired[position] += 1
                    acting.append(fault)
        return acting

    def planned(self, kind: str) -> list[EventFault]:
        """All faults of one kind, for what is set up before the run: crashes, stalls, partitions."""
        return [fault for fault in self.faults if isinstance(fault, EventFault) and fault.kind == kind]

    def note(self, fault: EventFault) -> None:
        """A fault that was set up before the run did change something."""
        self.fired[next(i for i, known in enumerate(self.faults) if known is fault)] += 1
