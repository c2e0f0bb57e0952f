"""Properties that every good run has: pure functions from a history to pass, fail or unknown, with the reason.

A checker sees the history and a `Plan`, which says what a correct connector would have to do; unknown is never a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from kvcover.sim.kernel.events import ASTRAY, Dial, Message, Stray
from kvcover.sim.kernel.history import Event, History, Row
from kvcover.sim.results.order import races, sees
from kvcover.sim.results.result import Check

Answer = tuple[bool | None, str]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run should do: decode ranks that need each request, prefill ranks that hold it, and who should reach whom.

    `users` are all decode ranks where a request is, also those that need nothing from prefill.
    `intended` maps a rank to the ranks that it may handshake with; ranks that are not in it are not judged.
    `observed` are the kinds of event that the tier sees (None: all), `one_queue` says that a transfer has one queue pair.
    """

    mode: str
    needed: Mapping[int, tuple[str, ...]]
    holders: Mapping[int, tuple[str, ...]]
    users: Mapping[int, tuple[str, ...]]
    intended: Mapping[str, tuple[str, ...]] = {}
    observed: frozenset[str] | None = None
    one_queue: bool = True


class Checker(msgspec.Struct, frozen=True):
    """A named property, what it says, and the public report that taught it."""

    name: str
    statement: str
    taught_by: str
    call: Callable[[History, Plan], Answer]
    needs: tuple[str, ...] = ()  # what a tier must see, so that to see nothing wrong means that nothing was


def coverage_at_go(history: History, plan: Plan) -> Answer:
    """Whether decode used only cells that held what they should."""
    short = history.events("short")
    if short:
        who = sorted({f"{event.actor} of request {event.request}" for event in short})
        return False, f"{', '.join(who[:4])}{' and more' if len(who) > 4 else ''}: {short[0].detail}"
    return (True, "all cells were there") if history.events("go") else (None, "no request went")


def no_stray_write(history: History, plan: Plan) -> Answer:
    """Whether every batch changed only cells of its own request."""
    strays = history.having(Stray, "stray")
    if strays:
        return False, f"{sum(fields.cells for _, fields in strays)} cells of other requests or free blocks changed"
    moved = history.rows_of("wrote", "read")
    return (True, "every batch stayed in its request") if moved else (None, "nothing moved")


def every_request_ends(history: History, plan: Plan) -> Answer:
    """Whether every client has an answer, good or bad."""
    ended = {e.request for e in history.events("ended", "request_failed", "refused", "aborted", "forgotten", "lost")}
    open_ones = sorted(set(plan.needed) - ended)
    return (not open_ones, f"requests {open_ones} never ended" if open_ones else "all ended")


def nothing_held(history: History, plan: Plan) -> Answer:
    """Whether both engines gave back all blocks, and none only because a timer fired."""
    held: Counter[tuple[str, int]] = Counter()
    for event in history.events("allocated", "freed", "reaped", "restarted"):
        if event.kind == "restarted":  # its memory is new
            held.update({holder: -count for holder, count in held.items() if holder[0] == event.actor})
        else:
            held[event.actor, event.request] += 1 if event.kind == "allocated" else -1
    kept = sorted({f"{actor} holds request {request}" for (actor, request), count in held.items() if count > 0})
    if kept:
        return False, f"{', '.join(kept[:4])} for ever"
    timers = history.events("expired", "reaped")
    if timers:
        return False, f"blocks were held until a timer of {timers[0].actor} fired"
    return (True, "all blocks are free again") if held else (None, "nothing was allocated")


def told_is_written_is_needed(history: History, plan: Plan) -> Answer:
    """Whether for each request the decode ranks that need it are those written and those told."""
    written, told = _pairs(history.rows_of("wrote", "read"), 3), _pairs(history.rows_of("told"), 2)
    answered = {event.request for event in history.events("refused", "recompute", "request_failed", "aborted", "lost")}
    for request, needed in plan.needed.items():
        if request in answered:
            continue
        want = set(needed)
        got, said = {name for r, name in written if r == request}, {name for r, name in told if r == request}
        if not want == got == said:
            return False, f"request {request}: needed {len(want)}, written {len(got & want)}, told {len(said & want)} ranks"
    return (True, "the same ranks") if set(plan.needed) - answered else (None, "no request was transferred")


def completed_once(history: History, plan: Plan) -> Answer:
    """Whether no decode rank took one transfer for complete twice."""
    twice = [pair for pair, count in Counter(_pair_list(history.rows_of("told"), 2)).items() if count > 1]
    if twice:
        return False, f"{twice[0][1]} completed request {twice[0][0]} more than once"
    return (True, "each at most once") if history.rows_of("told") else (None, "nothing was completed")


def no_use_before_landing(history: History, plan: Plan) -> Answer:
    """Whether no bytes of a request landed in a layer after decode had used it (READ), or after go (WRITE)."""
    goes = {event.request: event.time_ns for event in history.events("go")}
    if not goes:
        return None, "no request went"
    used = {(event.actor, event.request, event.layer): event.time_ns for event in history.events("short")}
    for time_ns, kind, _, rank, request, layer, _ in history.rows_of("wrote", "read"):
        late_write = kind == "wrote" and request in goes and time_ns > goes[request]
        late_read = kind == "read" and time_ns > used.get((rank, request, layer), time_ns)
        if late_write or late_read:
            return False, f"layer {layer} of request {request} landed at {rank} after it was used"
    return True, "everything landed before it was used"


def no_race(history: History, plan: Plan) -> Answer:
    """Whether every use, free and reuse of blocks is ordered after the landings that it must not meet, whatever the times."""
    if not sees(plan):
        return None, "this tier does not see what orders events"
    if (race := next(races(history, plan), None)) is not None:
        return False, f"nothing orders {race}"
    moved = history.rows_of("wrote", "read")
    return (True, "every use, free and reuse is ordered after what landed") if moved else (None, "nothing moved")


def source_held(history: History, plan: Plan) -> Answer:
    """Whether prefill kept its blocks until the last batch from them had landed."""
    freed = {e.request: e.time_ns for e in history.events("freed", "reaped") if e.actor.startswith("P")}
    if not freed:
        return None, "prefill freed nothing"
    for time_ns, _, source, rank, request, layer, _ in history.rows_of("wrote", "read"):
        if source.startswith("P") and time_ns > freed.get(request, time_ns):
            return False, f"layer {layer} of request {request} landed at {rank} after {source}'s engine had freed it"
    return True, "blocks were kept as long as they were read"


def dialled_is_intended(history: History, plan: Plan) -> Answer:
    """Whether every handshake reached a rank that holds, or needs, what the dialler has."""
    dialled = [event for event in history.events("dialled") if event.actor in plan.intended]
    wrong = [event for event in dialled if event.peer not in plan.intended[event.actor]]
    dead = history.having(Dial, "dial_dead")
    if wrong:
        return False, f"{wrong[0].actor} reached {wrong[0].peer}"
    if dead:
        return False, f"{dead[0][0].actor} dialled port {dead[0][1].port}, which nobody bound"
    return (True, "every handshake reached its rank") if dialled else (None, "nobody dialled")


def queues_bounded(history: History, plan: Plan) -> Answer:
    """Whether no message waits for ever in a socket to a port that nobody reads."""
    lost = history.having(Message, "undelivered")
    if lost:
        event, message = lost[0]
        return False, f"{len(lost)} messages wait for {event.peer or message.place} for ever"
    return True, "every message was read"


def engine_alive(history: History, plan: Plan) -> Answer:
    """Whether no engine died and no listener ended."""
    died = history.events("crashed", "poisoned", "bind_failed", "stuck")
    return (not died, f"{died[0].actor}: {died[0].detail}" if died else "both engines live")


CHECKERS: tuple[Checker, ...] = (
    Checker("coverage-at-go", "decode uses only cells that hold what they should", "vllm#47764", coverage_at_go),
    Checker("told-written-needed", "ranks that need data = written = told", "vllm#41211", told_is_written_is_needed),
    Checker("completed-once", "each transfer completes once at each rank", "vllm#46290", completed_once),
    Checker("no-use-before-landing", "no byte lands after its layer was used", "vllm#48534", no_use_before_landing, ("landing",)),
    Checker("no-race", "no use, free or reuse of blocks is left to time", "vllm#48534", no_race),
    Checker("source-held", "prefill keeps its blocks until they have landed", "vllm#56465", source_held, ("landing",)),
    Checker("no-stray-write", "a batch changes only cells of its own request", "vllm#48471", no_stray_write),
    Checker("dialled-is-intended", "every handshake reaches the rank that is meant", "vllm#47764", dialled_is_intended),
    Checker("every-request-ends", "every client gets an answer", "mori#655", every_request_ends),
    Checker("nothing-held", "all blocks are given back, and not by a timer", "vllm#51301", nothing_held),
    Checker("queues-bounded", "no message waits for ever", "vllm#41211", queues_bounded, ("undelivered",)),
    Checker("engine-alive", "no engine dies, no listener ends", "mori#432", engine_alive),
)  # fmt: skip


def check_all(history: History, plan: Plan) -> list[Check]:
    """The verdict of every checker; what the tier can't see is never a pass."""
    words = {True: "pass", False: "fail", None: "unknown"}
    checks = []
    for checker in CHECKERS:
        good, reason = checker.call(history, plan)
        if good and (blind := [what for what in checker.needs if plan.observed is not None and what not in plan.observed]):
            good, reason = None, f"this tier does not see {blind[0]}"
        checks.append(msgspec.convert({"name": checker.name, "verdict": words[good], "reason": reason}, Check))
    return checks


def _pair_list(rows: list[Row], column: int) -> list[tuple[int, str]]:
    """(request, rank) of rows; the rank stands in column 2 (actor) or 3 (peer)."""
    return [(row[4], str(row[column])) for row in rows if row[6] is not ASTRAY]


def _pairs(rows: list[Row], column: int) -> set[tuple[int, str]]:
    return set(_pair_list(rows, column))


__all__ = ["CHECKERS", "Checker", "Event", "Plan", "check_all"]
