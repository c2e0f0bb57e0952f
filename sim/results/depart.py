"""Where two runs depart from each other: the first event of each actor that only one of them has.

Real events have no common order: ranks run side by side, and the threads of a rank race each other. So what is compared is, for
each actor, the set of its events by kind, peer, request and layer, and not when or in which order they came. Of the
events that only one run has, the first is the one that the others may follow from: kinds are looked at in the order in which
they lead to each other. Kinds that a run can't see, that say what was asked of it, or that sum up its end are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvcover.sim.kernel.events import Dial, Fields, Listener, Sent, Took, Why
from kvcover.sim.kernel.history import Event, Row
from kvcover.sim.results.story import told

_MOST_LINES = 6
_BY: dict[str, tuple[str, ...]] = {
    "restarted": (),
    "aborted": ("request",),
    "allocated": ("request",),
    "recompute": ("request",),
    "blocks_ready_sent": ("peer", "request"),
    "blocks_ready": ("request",),
    "poisoned": (),
    "dial_dead": (),
    "dialled": ("peer",),
    "wrote": ("peer", "request", "layer"),
    "read": ("peer", "request", "layer"),
    "transfer_failed": ("request",),
    "crashed": (),
    "stray": (),
    "write_failed_sent": ("peer", "request"),
    "write_done_sent": ("peer", "request"),
    "write_done": ("request",),
    "told_failed": ("request",),
    "told": ("request",),
    "go": ("request",),
    "short": ("request",),
    "release_sent": ("peer", "request"),
    "release": ("request",),
    "released": ("request",),
    "reaped": ("request",),
    "freed": ("request",),
    "request_failed": ("request",),
    "ended": ("request",),
    "lost": ("request",),
}
"""The kinds that are compared, causes before what follows from them, and what tells two events of one actor apart."""
_PLACE = {kind: place for place, kind in enumerate(_BY)}


class Step(msgspec.Struct, frozen=True, array_like=True):
    """An event as a result keeps it: `detail` are the kind's own fields in words.

    `took_ns` is how long a batch was under way that was posted at `time_ns`, -1 where that is not known, and for other kinds.
    """

    time_ns: int
    kind: str
    actor: str
    peer: str = ""
    request: int = -1
    layer: int = -1
    detail: str = ""
    took_ns: int = -1


def steps_of(rows: Sequence[Row]) -> list[Step]:
    """A history as results keep it; who bound a port is the peer of what went there."""
    owners = {fields.port: row[2] for row in rows if row[1] == "bound" and isinstance(fields := row[6], Listener)}

    def step(time_ns: int, kind: str, actor: str, peer: str, request: int, layer: int, fields: Fields | None) -> Step:
        there = peer or (owners.get(fields.port, "") if isinstance(fields, Sent | Dial) and kind != "dial_dead" else "")
        took = fields.ns if isinstance(fields, Took) else -1
        return Step(time_ns, kind, actor, there, request, layer, "" if fields is None else str(fields), took)

    return [step(*row) for row in rows]


def departures(ours: Iterable[Step], theirs: Iterable[Step], there: str) -> list[str]:
    """The first events of each actor that only one of two runs has, in words; empty if they have the same.

    `there` names the other run. Actors that depart alike are one line, and those that depart first come first.
    """
    mine, other = _compared(ours), _compared(theirs)
    only = [("here, and not in " + there, mine, other), ("in " + there + ", and not here", other, mine)]
    found: dict[str, list[tuple[str, Step]]] = defaultdict(list)
    for where, one, two in only:
        for key, step in one.items():
            if key not in two:
                found[step.actor].append((where, step))
    groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for steps in found.values():
        first = min(_PLACE[step.kind] for _, step in steps)
        for where, step in steps:
            if _PLACE[step.kind] == first:
                groups[first, where].append(_event(step))
    lines = [f"{where}: {told(events)}" for (_, where), events in sorted(groups.items(), key=lambda item: item[0])]
    return [*lines[:_MOST_LINES], *([f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])]


def _compared(steps: Iterable[Step]) -> dict[tuple[object, ...], Step]:
    """What is compared, by what tells it apart."""
    return dict(reversed([(key, step) for step in steps for key in _keys(step)]))


def _keys(step: Step) -> Iterator[tuple[object, ...]]:
    if step.kind == "crashed":  # a rank's exception or its engine's end are one thing
        yield step.kind, step.actor[:1].upper()
    elif step.kind in _BY:
        yield (step.kind, step.actor, *(getattr(step, name) for name in _BY[step.kind]))


def _event(step: Step) -> Event:
    whom = step.peer or (step.detail if step.kind == "dial_dead" or step.kind.endswith("_sent") else "")
    return Event(step.time_ns, step.kind, step.actor, whom, step.request, step.layer, Why(step.detail))
