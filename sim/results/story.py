"""The story of one request, from the router to its outcome, in at most 25 lines with times."""

from __future__ import annotations

from collections.abc import Iterable

from kvcover.sim.errors import InputError
from kvcover.sim.kernel.events import Dial, Sent
from kvcover.sim.kernel.history import Event
from kvcover.sim.results.chains import span
from kvcover.sim.results.keys import in_words, peer_tp_causes, tell_keys
from kvcover.sim.results.outcome import request_outcome
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import MEANING

MOST_LINES = 25
_QUIET = ("bound", "leg_sent", "fault_fired", "stands")
# How the events of one kind are told: {who}, {whom}, {n} events, {layers} of them distinct, {detail} of the first.
_TOLD = {
    "stuck": "{who} never came up, or never came back from a step: {detail}",
    "bind_failed": "{who} could not bind its port {detail}: its engine never starts",
    "blocks_ready_sent": "{who} told prefill its blocks, at {whom}",
    "blocks_ready": "{who} learned decode's blocks",
    "blocks_ready_again": "{who} learned decode's blocks a second time and counts anew",
    "undelivered": "{n} messages of {who} reached nobody ({detail})",
    "poisoned": "{who}: {detail} killed the notify thread",
    "dialled": "{who} handshook: {whom} answered",
    "dial_dead": "{who} dialled {whom}, which nobody had bound, and waits",
    "map_refused": "{who} could not map itself onto the peer: {detail}",
    "stalled": "{who} stood still {n} times ({detail} each)",
    "wrote": "{who} wrote {layers} layers into {whom}",
    "read": "{whom} read {layers} layers from {who}",
    "transfer_failed": "{who}: {detail}, {n} times",
    "task_failed": "{who}: {detail}; the transfer is marked done and nobody is told",
    "write_done_sent": "{who} said done, to {whom}",
    "write_failed_sent": "{who} said that nothing will come, to {whom}",
    "allocated": "{who} gave the request its blocks",
    "sealed_short": "{who} sealed the transfer with {detail}",
    "used_early": "{who} used {layers} layers before their reads from {whom} landed",
    "short": "{who} used its cells, of which not all were right: {detail}",
    "stray": "{who}: {detail} of others changed",
    "lost": "{who} gave up: {detail}",
    "settled": "{who} waited until its batches were over",
    "write_done": "{who} got a write_done",
    "told": "{who} took its blocks for complete",
    "told_failed": "{who} learned that its blocks never come",
    "expired": "{who} gave up waiting for decode's blocks",
    "release_sent": "{who} released prefill's blocks, to {whom}",
    "release": "{who} learned that its blocks were read",
    "released": "{who} reported the transfer finished",
    "freed": "{who} freed the blocks",
    "reaped": "{who} freed the blocks because its timer fired",
    "go": "{who} resumed the request: decode uses its cells",
    "put_off": "{who} put off the read and runs the request without it",
    "recompute": "{who} computes the prompt itself",
    "load_failed": "{who}: {detail}",
    "refused": "{who} refused: {detail}",
    "request_failed": "{who} failed the request: {detail}",
    "ended": "{who} finished the request",
    "crashed": "{who} died: {detail}",
    "restarted": "{who} is back, with the same ports and new memory",
    "unreachable": "{who} could not reach {whom}: it is down",
    "aborted": "{who}: the client went away",
    "preempted": "{who} took the request's blocks",
    "forgotten": "{who} no longer knows {whom}",
    "redirected": "{who} no longer knows the first instance of {whom}, and takes the next one",
}


def story(record: Record, request: int = 0) -> list[str]:
    """What happened to one request of a run, in at most 25 lines; raises InputError for a request that isn't there.

    Events of one kind that follow each other are one line with their first and last time, in ms, which are virtual on the model.

    >>> eight = Scenario(release="0.26.0", model="deepseek-v3", prefill=Side(tp=8), decode=Side(tp=8))
    >>> result, world = run_world(resolve(eight))
    >>> story(record_of(world))[-1]
    'so: corrupt (decode ran on missing or wrong cells), 976 of 7808 cells covered'
    """
    if not 0 <= request < len(record.courses):
        raise InputError("request", f"there is no request {request}", f"use 0 to {len(record.courses) - 1}")
    course = record.courses[request]
    outcome, went = request_outcome(course), course.cells
    covered, cells = sum(count.covered for count in went), sum(count.cells for count in went)
    body = [_line(group) for group in _groups(_events(record, request))]
    last = f"so: {outcome} ({MEANING[outcome]}), {covered} of {cells} cells covered"
    head = _legs(record, request)
    room = MOST_LINES - len(head) - 1
    if len(body) > room:
        body = [*body[: room - 2], f"… {len(body) - room + 1} more steps (all are in the history) …", body[-1]]
    return [*head, *body, last]


def _events(record: Record, request: int) -> list[Event]:
    """Events of the request, and those of no request, such as a crash, that concern everybody."""
    return [e for e in record.history.events() if e.request in (request, -1) and e.kind not in _QUIET]


def _legs(record: Record, request: int) -> list[str]:
    """What left the router, as far as it matters, and how the side that moves the data read it."""
    lines = []
    for side in ("prefill", "decode"):
        params = record.legs.get((request, side))
        if params is None:
            continue
        sizes = ", ".join(f"{key} {params[key]!r}" for key in ("remote_tp_size", "tp_size", "remote_dp_size") if key in params)
        lines.append(f"router → {side}: {sizes or 'no sizes'} ({len(params)} keys)")
    side = "prefill" if record.mode == "write" else "decode"
    endpoint = record.setup.prefill if side == "prefill" else record.setup.decode
    if seen := [line for leg in tell_keys(record) if request in leg.requests for line in in_words(leg)]:
        lines += seen
    elif params := record.legs.get((request, side)):
        by_model = record.tier != "model"
        read = "; ".join(cause.told(by_model) for cause in peer_tp_causes(endpoint.release, params, side))
        lines.append(f"{side} reads it: {read}")
    fired = [event.detail for event in record.history.events("fault_fired") if event.request in (request, -1)]
    if fired:
        lines.append(f"faults that fired: {', '.join(dict.fromkeys(fired))}")
    return lines


def _groups(events: list[Event]) -> Iterable[list[Event]]:
    """Events of a kind together, in the order of their first; told and written layers interleave and need not be apart."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        key = (event.kind, event.detail if event.kind in ("task_failed", "transfer_failed", "poisoned") else "")
        groups.setdefault(key, []).append(event)
    return groups.values()


def _line(group: list[Event]) -> str:
    first, last = group[0], group[-1]
    when = f"{first.time_ns / 1e6:.3f}" if first.time_ns == last.time_ns else f"{first.time_ns / 1e6:.3f}–{last.time_ns / 1e6:.3f}"
    return f"{when} ms  {told(group)}"


def told(group: list[Event]) -> str:
    """Events of one kind in words: who did what, to whom."""
    first = group[0]
    return _TOLD[first.kind].format(
        who=span(dict.fromkeys(event.actor for event in group)),
        whom=_whom(group),
        n=len(group),
        layers=len({event.layer for event in group}),
        detail=first.detail,
    )


def _whom(group: list[Event]) -> str:
    """Peers, or else the ports that were meant, as people read them: `ports 62005–62012`."""
    listed = list(dict.fromkeys(event.peer for event in group if event.peer))
    numbers = sorted({event.fields.port for event in group if isinstance(event.fields, Sent | Dial) and not event.peer})
    if len(numbers) == 1:
        return f"port {numbers[0]}"
    if numbers:
        neighbours = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return f"ports {numbers[0]}–{numbers[-1]}" if neighbours else "ports " + ", ".join(map(str, numbers))
    return span(listed) if listed else "nobody"
