"""A finished run as a timeline in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens, or line by line.

One process an engine, one track a rank, `scheduler` for what is the engine's. Slices are how long a batch was under way, how long
an engine held a request's blocks and how long decode waited for them; as slices of one track must lie inside or after each other,
they are on lanes of their own, as many as overlap. Messages, sent and received, are slices of a microsecond at most on the rank's
own track, so that arrows have something to hold on to: from what was sent to where it arrived, from a batch to where it landed.
All else is an instant. Times are virtual on the model; on a real tier they are those of the machine's monotonic clock, from the
first leg on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcover.sim.kernel.events import KINDS
from kvcover.sim.results.depart import Step
from kvcover.sim.scenario.setup import Setup

_US = 1000.0  # ns in the format's unit
_TICK_NS = 1000
_LANES = 1_000_000  # room for the lanes of a track among the numbers of tracks
_ARRIVES = {
    "blocks_ready_sent": ("blocks_ready", "blocks_ready_again"),
    "write_done_sent": ("write_done",),
    "write_failed_sent": ("told_failed",),
    "release_sent": ("release",),
}
"""What the arrival of a message is, by what its departure is."""
_MESSAGES = {*_ARRIVES, *(arrival for arrivals in _ARRIVES.values() for arrival in arrivals)}
_MOVED = ("wrote", "read")


class Place(NamedTuple):
    """A track: its process and its number in there."""

    pid: int
    tid: int


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the format: `ts` and `dur` in µs, `ph` i(nstant), X (a slice), M (a name), or s and f, the ends of an arrow."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    s: str | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    args: dict[str, Any] = {}


class _Slice(NamedTuple):
    """A slice that is yet to find its track."""

    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


def lines(steps: Iterable[Step]) -> str:
    """The same events for machines: a JSON object a line, in order of time (ns). What an event does not have is null."""
    rows = [
        {
            "time_ns": step.time_ns, "kind": step.kind, "actor": step.actor, "peer": step.peer or None,
            "request": step.request if step.request >= 0 else None, "layer": step.layer if step.layer >= 0 else None,
            "took_ns": step.took_ns if step.took_ns >= 0 else None, "detail": step.detail or None,
        }
        for step in sorted(steps, key=lambda step: step.time_ns)
    ]  # fmt: skip
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def trace(setup: Setup, steps: Sequence[Step], one_clock: bool = True) -> str:
    """The timeline of a finished run as JSON. Without `one_clock` ranks have clocks of their own, and there are no arrows."""
    tracks = _Tracks(setup)
    known = [step for step in map(tracks.named, steps) if step.actor in tracks.places]
    entries: list[_Entry] = []
    ticks: dict[Place, list[_Slice]] = defaultdict(list)
    batches: dict[str, list[_Slice]] = defaultdict(list)
    arrows = _Arrows()
    for step in known:
        place = tracks.places[step.actor]
        if step.kind in _MESSAGES:
            ticks[place].append(_Slice(step.kind, step.time_ns, step.time_ns + _TICK_NS, _args(step)))
        elif step.kind in _MOVED and step.took_ns >= 0 and step.peer in tracks.places:
            poster = step.actor if step.kind == "wrote" else step.peer
            batches[poster].append(_Slice(step.kind, step.time_ns, step.time_ns + step.took_ns, _args(step)))
            if one_clock:
                for at, who, word in ((step.time_ns, step.actor, "sends"), (step.time_ns + step.took_ns, step.peer, "landed")):
                    ticks[tracks.places[who]].append(_Slice(word, at, at + _TICK_NS, _about(step)))
                arrows.add(
                    f"layer {step.layer} of request {step.request}",
                    (place, step.time_ns),
                    (tracks.places[step.peer], step.time_ns + step.took_ns),
                )
        else:
            entries.append(_Entry(step.kind, "i", *place, ts=step.time_ns / _US, s="t", args=_args(step)))
    if one_clock:
        for name, sent, arrived in _messages(known):
            arrows.add(name, (tracks.places[sent.actor], sent.time_ns), (tracks.places[arrived.actor], arrived.time_ns))
    for place, mine in ticks.items():
        entries += [_slice(place, each) for each in _apart(mine)]
    for rank, mine in batches.items():
        entries += tracks.on_lanes(rank, f"{rank} batches", mine)
    for engine, mine in _held(known).items():
        entries += tracks.on_lanes(engine, "requests", mine)
    whole = {"displayTimeUnit": "ms", "traceEvents": [*tracks.names(), *entries, *arrows.entries]}
    return msgspec.json.encode(whole).decode() + "\n"


def _args(step: Step) -> dict[str, Any]:
    return {"what": KINDS.get(step.kind, step.kind)} | _about(step) | ({"detail": step.detail} if step.detail else {})


def _about(step: Step) -> dict[str, Any]:
    told: dict[str, Any] = (
        {"from": step.actor, "to": step.peer} if step.kind in _MOVED else {"peer": step.peer} if step.peer else {}
    )
    told |= {"request": step.request} if step.request >= 0 else {}
    return told | ({"layer": step.layer} if step.layer >= 0 else {})


def _slice(place: Place, each: _Slice) -> _Entry:
    return _Entry(each.name, "X", *place, ts=each.start_ns / _US, dur=(each.end_ns - each.start_ns) / _US, args=each.args)


class _Tracks:
    """Processes and tracks: the router, every engine with its scheduler and its ranks, and lanes as they are needed."""

    def __init__(self, setup: Setup) -> None:
        self.places: dict[str, Place] = {"router": Place(0, 0)}
        self._titles = ["router"]
        self._tracks = {Place(0, 0): "legs"}
        self._schedulers: dict[str, str] = {}
        for me in (setup.prefill, setup.decode):
            for dp in range(me.all_dp):
                pid, name, role = len(self._titles), me.engine_name(dp), "prefill" if me.letter == "P" else "decode"
                self._titles.append(f"{name} ({role}, vLLM {me.release.name})")
                self._schedulers[f"{role} scheduler {dp}"] = name  # as its exceptions are reported
                self.places[name] = Place(pid, 0)
                self.places |= {me.rank_name(dp, tp): Place(pid, (tp + 1) * _LANES) for tp in range(me.tp)}
                self._tracks |= {self.places[name]: "scheduler"}
                self._tracks |= {self.places[rank]: rank for rank in (me.rank_name(dp, tp) for tp in range(me.tp))}

    def named(self, step: Step) -> Step:
        """A step of a scheduler's process as its engine's."""
        name = self._schedulers.get(step.actor)
        return step if name is None else msgspec.structs.replace(step, actor=name)

    def on_lanes(self, owner: str, name: str, slices: Iterable[_Slice]) -> Iterator[_Entry]:
        """Slices on lanes below the owner's track, each on the first in which it lies inside or after all others."""
        ends: list[list[int]] = []  # by lane, ends of the slices that are open
        for each in sorted(slices, key=lambda each: (each.start_ns, -each.end_ns)):
            lane = next((lane for lane, still in enumerate(ends) if _fits(still, each)), len(ends))
            if lane == len(ends):
                ends.append([])
            ends[lane].append(each.end_ns)
            pid, tid = self.places[owner]
            place = Place(pid, tid + 1 + lane)
            self._tracks[place] = f"{name} {lane + 1}" if lane else name
            yield _slice(place, each)

    def names(self) -> Iterator[_Entry]:
        """The entries that name processes and tracks, and put them in order."""
        for pid, title in enumerate(self._titles):
            yield _Entry("process_name", "M", pid, 0, args={"name": title})
            yield _Entry("process_sort_index", "M", pid, 0, args={"sort_index": pid})
        for place, name in sorted(self._tracks.items()):
            yield _Entry("thread_name", "M", *place, args={"name": name})
            yield _Entry("thread_sort_index", "M", *place, args={"sort_index": place.tid})


def _fits(still: list[int], each: _Slice) -> bool:
    """Whether a slice may be on a lane; what is over by then is forgotten."""
    while still and still[-1] <= each.start_ns:
        still.pop()
    return not still or each.end_ns <= still[-1]


def _apart(ticks: Iterable[_Slice]) -> Iterator[_Slice]:
    """Ticks of one track, each cut short where the next begins; those of one instant are as long as each other."""
    found = sorted(ticks, key=lambda tick: tick.start_ns)
    later = sorted({tick.start_ns for tick in found})
    following = dict(zip(later, [*later[1:], later[-1] + _TICK_NS], strict=True)) if later else {}
    return (tick._replace(end_ns=min(tick.end_ns, following[tick.start_ns])) for tick in found)


def _held(steps: Sequence[Step]) -> dict[str, list[_Slice]]:
    """By engine how long blocks are held, and how long decode waits for its KV; what never ends goes to the end of the run."""
    begun: dict[tuple[str, int, str], int] = {}
    found: dict[str, list[_Slice]] = defaultdict(list)
    ends = {"freed": "holds", "reaped": "holds", "go": "waits for", "request_failed": "waits for", "recompute": "waits for"}
    last = max((step.time_ns + max(step.took_ns, 0) for step in steps), default=0)
    for step in sorted(steps, key=lambda step: step.time_ns):
        if step.kind == "allocated":
            begun[step.actor, step.request, "holds"] = step.time_ns
            if step.actor.startswith("D"):
                begun[step.actor, step.request, "waits for"] = step.time_ns
        elif step.kind in ends and (start := begun.pop((step.actor, step.request, ends[step.kind]), None)) is not None:
            said = {"request": step.request}
            found[step.actor].append(_Slice(f"{ends[step.kind]} request {step.request}", start, step.time_ns, said))
    for (actor, request, what), start in begun.items():
        found[actor].append(_Slice(f"{what} request {request}, for ever", start, last, {"request": request}))
    return found


class _Arrows:
    """Both ends of each arrow, which share its number; each lies on a slice that begins there."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._count = 0

    def add(self, name: str, start: tuple[Place, int], end: tuple[Place, int]) -> None:
        """Draw one, in ns."""
        self._count += 1
        for ph, (place, at_ns), bp in (("s", start, None), ("f", end, "e")):
            self.entries.append(_Entry(name, ph, *place, ts=at_ns / _US, cat="arrow", id=self._count, bp=bp))


def _messages(steps: Sequence[Step]) -> Iterator[tuple[str, Step, Step]]:
    """Messages with their arrivals: the first that came at a rank is of the first that was sent to it, of those not earlier."""
    waiting: dict[tuple[str, str, int], list[Step]] = defaultdict(list)
    kinds = {arrival: sent for sent, arrivals in _ARRIVES.items() for arrival in arrivals}
    for step in sorted(steps, key=lambda step: step.time_ns):
        if step.kind in _ARRIVES:
            waiting[step.kind, step.peer, step.request].append(step)
        elif (kind := kinds.get(step.kind)) is not None:
            line = waiting[kind, step.actor, step.request]
            sent = next((each for each in line if step.peer in ("", each.actor)), None)
            if sent is not None:
                line.remove(sent)
                yield f"{kind.removesuffix('_sent')} of request {step.request}", sent, step
