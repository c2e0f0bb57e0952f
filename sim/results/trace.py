"""A finished run as a timeline in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens.

One process an engine, one thread a rank; engine-wide events are on the thread `scheduler`. Each event is an instant; how long an
engine held a request's blocks, how long decode waited for them and, in a real run, how long a batch was under way are spans.
Arrows go from what was sent to where it arrived. Times are virtual on the model; on a real tier they are those of the machine's
monotonic clock, from the first leg on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvcover.sim.kernel.events import KINDS
from kvcover.sim.results.depart import Step
from kvcover.sim.scenario.setup import Setup

_US = 1000.0  # ns in the format's unit
_TICK_US = 1.0
_ARRIVES = {
    "blocks_ready_sent": ("blocks_ready", "blocks_ready_again"),
    "write_done_sent": ("write_done",),
    "write_failed_sent": ("told_failed",),
    "release_sent": ("release",),
}
"""What the arrival of a message is, by what its departure is."""
Place = tuple[int, int]


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the format: `ts` and `dur` in µs, `ph` i(nstant), X (a span), M (a name), or s and f, the ends of an arrow."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    s: str | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    args: dict[str, Any] = {}


def trace(setup: Setup, steps: Sequence[Step], one_clock: bool = True) -> str:
    """The timeline of a finished run as JSON. Without `one_clock` ranks have clocks of their own, and there are no arrows."""
    places: dict[str, Place] = {"router": (0, 0)}
    titles, processes = {"router": "router"}, {}
    pid = 0
    for me in (setup.prefill, setup.decode):
        for dp in range(me.all_dp):
            pid += 1
            name, role = me.engine_name(dp), "prefill" if me.letter == "P" else "decode"
            titles[name] = f"{name} ({role}, vLLM {me.release.name})"
            processes[f"{role} scheduler {dp}"] = name  # as its exceptions are reported
            places[name] = (pid, 0)
            places |= {me.rank_name(dp, tp): (pid, tp + 1) for tp in range(me.tp)}
    named = [msgspec.structs.replace(step, actor=processes.get(step.actor, step.actor)) for step in steps]
    known = [step for step in named if step.actor in places]
    events = [*_names(titles, places), *_instants(known, places), *_spans(known, places), *_batches(known, places)]
    if one_clock:
        events += _arrows(known, places)
    whole = {"displayTimeUnit": "ms", "traceEvents": events}
    return msgspec.json.encode(whole).decode() + "\n"


def _names(titles: dict[str, str], places: dict[str, Place]) -> Iterator[_Event]:
    for name, (pid, tid) in places.items():
        if name in titles:
            yield _Event("process_name", "M", pid, tid, args={"name": titles[name]})
            yield _Event("thread_name", "M", pid, tid, args={"name": "legs" if name == "router" else "scheduler"})
        else:
            yield _Event("thread_name", "M", pid, tid, args={"name": name})


def _instants(steps: Sequence[Step], places: dict[str, Place]) -> Iterator[_Event]:
    for step in steps:
        said: dict[str, Any] = {"what": KINDS[step.kind]}
        said |= {"peer": step.peer} if step.peer else {}
        said |= {"request": step.request} if step.request >= 0 else {}
        said |= {"layer": step.layer} if step.layer >= 0 else {}
        said |= {"detail": step.detail} if step.detail else {}
        yield _Event(step.kind, "i", *places[step.actor], ts=step.time_ns / _US, s="t", args=said)


def _spans(steps: Sequence[Step], places: dict[str, Place]) -> Iterator[_Event]:
    """How long blocks are held, and how long decode waits for its KV; what never ends goes to the end of the run."""
    begun: dict[tuple[str, int, str], int] = {}
    ends = {"freed": "holds", "reaped": "holds", "go": "waits for", "request_failed": "waits for", "recompute": "waits for"}
    for step in sorted(steps, key=lambda step: step.time_ns):
        if step.kind == "allocated":
            begun[step.actor, step.request, "holds"] = step.time_ns
            if step.actor.startswith("D"):
                begun[step.actor, step.request, "waits for"] = step.time_ns
        elif step.kind in ends and (start := begun.pop((step.actor, step.request, ends[step.kind]), None)) is not None:
            yield _span(places[step.actor], f"{ends[step.kind]} request {step.request}", start, step.time_ns)
    last = max((step.time_ns for step in steps), default=0)
    for (actor, request, what), start in begun.items():
        yield _span(places[actor], f"{what} request {request}, for ever", start, last)


def _batches(steps: Sequence[Step], places: dict[str, Place]) -> Iterator[_Event]:
    """How long each batch of a real run was under way, on the track of the rank that posted it."""
    for step in steps:
        if step.took_ns and step.peer in places:
            poster, other = (step.actor, step.peer) if step.kind == "wrote" else (step.peer, step.actor)
            name = f"layer {step.layer} of request {step.request}, {'to' if step.kind == 'wrote' else 'from'} {other}"
            yield _span(places[poster], name, step.time_ns, step.time_ns + step.took_ns)


def _span(place: Place, name: str, start: int, end: int) -> _Event:
    return _Event(name, "X", *place, ts=start / _US, dur=(end - start) / _US)


def _arrows(steps: Sequence[Step], places: dict[str, Place]) -> Iterator[_Event]:
    """From each message to its arrival, and from who has the bytes to who gets them. Each end is on a span of a µs of its own."""
    pairs = [*_messages(steps)]
    for step in steps:
        if step.kind in ("wrote", "read") and step.peer in places:
            landed = msgspec.structs.replace(step, actor=step.peer, time_ns=step.time_ns + step.took_ns)
            pairs.append((f"layer {step.layer} of request {step.request}", step, landed))
    for number, (name, here, there) in enumerate(pairs, 1):
        for ph, step, bp in (("s", here, None), ("f", there, "e")):
            (pid, tid), at = places[step.actor], step.time_ns / _US
            yield _Event(name, "X", pid, tid, ts=at, dur=_TICK_US)
            yield _Event(name, ph, pid, tid, ts=at, cat="arrow", id=number, bp=bp)


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
