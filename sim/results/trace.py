"""A finished run as a timeline in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens.

One process an engine, one thread a rank; engine-wide events are on the thread `scheduler`. Each event of the history is an
instant; how long an engine held a request's blocks, and how long decode waited for them, are spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvcover.sim.kernel.events import KINDS
from kvcover.sim.results.record import Record

_US = 1000.0  # ns in the format's unit


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the format: `ts` and `dur` in µs, `ph` i(nstant), X (a span) or M (a name)."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    s: str | None = None
    args: dict[str, Any] = {}


def trace(record: Record) -> str:
    """The timeline of a finished run as JSON."""
    places = {"router": (0, 0)}
    for pid, engine in enumerate(record.engines, start=1):
        places[engine.name] = (pid, 0)
        places |= {engine.me.rank_name(engine.dp, tp): (pid, tp + 1) for tp in range(engine.me.tp)}
    events = [*_names(record, places), *_instants(record, places), *_spans(record, places)]
    whole = {"displayTimeUnit": "ms", "traceEvents": events}
    return msgspec.json.encode(whole).decode() + "\n"


def _names(record: Record, places: dict[str, tuple[int, int]]) -> Iterator[_Event]:
    titles = {"router": "router"} | {
        engine.name: f"{engine.name} ({'prefill' if engine.me.letter == 'P' else 'decode'}, vLLM {engine.me.release.name})"
        for engine in record.engines
    }
    for name, (pid, tid) in places.items():
        if name in titles:
            yield _Event("process_name", "M", pid, tid, args={"name": titles[name]})
            yield _Event("thread_name", "M", pid, tid, args={"name": "legs" if name == "router" else "scheduler"})
        else:
            yield _Event("thread_name", "M", pid, tid, args={"name": name})


def _instants(record: Record, places: dict[str, tuple[int, int]]) -> Iterator[_Event]:
    for time_ns, kind, actor, peer, request, layer, fields in record.history.rows:
        pid, tid = places[actor]
        said: dict[str, Any] = {"what": KINDS[kind]}
        said |= {"peer": peer} if peer else {}
        said |= {"request": request} if request >= 0 else {}
        said |= {"layer": layer} if layer >= 0 else {}
        said |= {"detail": str(fields)} if fields is not None else {}
        yield _Event(kind, "i", pid, tid, ts=time_ns / _US, s="t", args=said)


def _spans(record: Record, places: dict[str, tuple[int, int]]) -> Iterator[_Event]:
    """How long blocks are held, and how long decode waits for its KV; what never ends goes to the end of the run."""
    begun: dict[tuple[str, int, str], int] = {}
    ends = {"freed": "holds", "reaped": "holds", "go": "waits for", "request_failed": "waits for", "recompute": "waits for"}
    for event in record.history.events("allocated", "go", "request_failed", "recompute", "freed", "reaped"):
        if event.kind == "allocated":
            begun[event.actor, event.request, "holds"] = event.time_ns
            if event.actor.startswith("D"):
                begun[event.actor, event.request, "waits for"] = event.time_ns
        elif (start := begun.pop((event.actor, event.request, ends[event.kind]), None)) is not None:
            yield _span(places[event.actor], f"{ends[event.kind]} request {event.request}", start, event.time_ns)
    for (actor, request, what), start in begun.items():
        yield _span(places[actor], f"{what} request {request}, for ever", start, record.history.last_ns())


def _span(place: tuple[int, int], name: str, start: int, end: int) -> _Event:
    return _Event(name, "X", *place, ts=start / _US, dur=(end - start) / _US)
