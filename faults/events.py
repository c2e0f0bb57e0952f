"""Faults of everything but the params: messages, transfers, ranks, scheduling, the router and the fabric.

Each is data: a kind, what it aims at, and when it fires. `Injector` counts occurrences and says which faults act; what
acting means is up to the tier.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvcover.faults.kinds import FaultKind, FaultSyntaxError, near
from kvcover.faults.read import plain_float, plain_int

MESSAGES = ("remote_blocks", "write_done", "write_failed", "release")
STATUSES = ("ERR_INVALID_ARGS", "ERR_NOT_FOUND", "ERR_RDMA_OP", "ERR_BAD_STATE", "ERR_GPU_OP")
ABORT_AT = ("before", "waiting", "after")

# Every parameter that some kind takes: how it is read, and, of numbers, from what to what they go.
_READERS: dict[str, Any] = {
    "from": str, "to": str, "n": plain_int, "request": plain_int, "layer": plain_int, "ms": plain_float, "for": plain_float,
    "port": plain_int, "status": str, "fraction": plain_float, "times": plain_int, "at": str, "dp": plain_int, "pattern": str,
    "factor": plain_float, "after": plain_float, "tp": plain_int,
}  # fmt: skip
_RANGES: dict[str, tuple[int, int]] = {
    "n": (0, 10**6), "request": (0, 4095), "layer": (0, 1023), "ms": (0, 10**9), "for": (0, 10**9), "port": (-65535, 65535),
    "times": (1, 10**6), "dp": (0, 255), "factor": (1, 10**6), "after": (0, 10**9), "tp": (1, 256),
}  # fmt: skip
_LONGEST_PATTERN = 1000
_REQUEST = re.compile(r"[0-9]{1,4}")
_WHEN = ("from", "to", "n", "request", "pattern", "after")

EVENT_KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("drop-notice", "drop-notice:MESSAGE", "notice", "the message never arrives", "mori#655", _WHEN),
        FaultKind("duplicate-notice", "duplicate-notice:MESSAGE", "notice", "the message arrives twice, `ms` apart",
                  "vllm#46290", (*_WHEN, "ms")),
        FaultKind("delay-notice", "delay-notice:MESSAGE,ms=N", "notice", "the message, and what follows on its socket, is late",
                  "vllm#51301", (*_WHEN, "ms")),
        FaultKind("reorder-notice", "reorder-notice:MESSAGE,ms=N", "notice", "the message alone is late: others overtake it",
                  "LMCache#1350", (*_WHEN, "ms")),
        FaultKind("poison-notice", "poison-notice:MESSAGE", "notice", "the message is garbage and kills the notify thread",
                  "sglang#35965", _WHEN),
        FaultKind("misroute-notice", "misroute-notice:MESSAGE,port=N", "notice", "the message goes to a port N further",
                  "vllm#53579, router#223", (*_WHEN, "port")),
        FaultKind("replay-notice", "replay-notice:MESSAGE,ms=N", "notice", "the message arrives again when it is stale",
                  "vllm#52234", (*_WHEN, "ms")),
        FaultKind("fail-transfer", "fail-transfer:write|read", "transfer", "a batch ends with an error status, nothing lands",
                  "mori#670", (*_WHEN, "layer", "status")),
        FaultKind("partial-transfer", "partial-transfer:write|read,fraction=X", "transfer",
                  "only part of a batch lands, then it fails", "nixl#2107", (*_WHEN, "layer", "fraction")),
        FaultKind("delay-transfer", "delay-transfer:write|read,ms=N", "transfer", "a batch lands late", "vllm#48534",
                  (*_WHEN, "layer", "ms")),
        FaultKind("late-transfer", "late-transfer:write|read,ms=N", "transfer", "a batch fails, and lands all the same later",
                  "mori#113", (*_WHEN, "layer", "ms")),
        FaultKind("lose-completion", "lose-completion:write|read", "transfer", "the data lands, the completion never comes",
                  "mori#655", (*_WHEN, "layer")),
        FaultKind("early-completion", "early-completion:write|read,ms=N", "transfer", "the completion comes before the data",
                  "mori#434", (*_WHEN, "layer", "ms")),
        FaultKind("sq-full", "sq-full:write|read", "transfer", "the send queue is full, `times` posts long",
                  "InferenceX#1914", (*_WHEN, "layer", "times")),
        FaultKind("slow-nic", "slow-nic:RANK,factor=X", "fabric", "a rank's NIC runs X times slower", "sglang#27209", ("factor",)),
        FaultKind("partition", "partition:RANK,ms=N,for=N", "fabric", "a rank reaches nobody for a while", "mori#655",
                  ("ms", "for")),
        FaultKind("latency-spike", "latency-spike:RANK,ms=N,for=N,factor=X", "fabric", "messages of a rank take X times as long",
                  "vllm#51301", ("ms", "for", "factor")),
        FaultKind("crash-rank", "crash-rank:RANK,ms=N", "rank", "the rank's process dies, and its engine with it",
                  "dynamo#13694", ("ms",)),
        FaultKind("restart-rank", "restart-rank:RANK,ms=N,for=N", "rank",
                  "the rank dies, and its engine comes back `for` ms later: the same ports, new memory", "LMCache#4069, dynamo#13694",
                  ("ms", "for")),
        FaultKind("stall-rank", "stall-rank:RANK,ms=N,for=N", "rank", "the rank stands still for a while", "vllm#46332",
                  ("ms", "for")),
        FaultKind("late-rank", "late-rank:RANK,ms=N", "rank", "the rank binds its ports late", "vllm#42839", ("ms",)),
        FaultKind("abort", "abort:REQUEST,at=before|waiting|after", "schedule", "the client goes away", "vllm#46283",
                  ("at", "ms")),
        FaultKind("preempt", "preempt:REQUEST", "schedule", "decode preempts the request after its load and resumes it",
                  "vllm#57705, vllm#53549", ()),
        FaultKind("stop-at-prefill", "stop-at-prefill:REQUEST", "schedule", "the first token is a stop token",
                  "vllm 0.24 to 0.33, by reading", ()),
        FaultKind("delay-step", "delay-step:prefill|decode,ms=N", "schedule", "the engine's steps are held up", "vllm#51301",
                  ("ms", "n")),
        FaultKind("fail-leg", "fail-leg:prefill|decode", "router", "the router fails to send a leg", "router#157",
                  ("request", "n")),
        FaultKind("delay-leg", "delay-leg:prefill|decode,ms=N", "router", "a leg leaves late, so legs change order",
                  "vllm#46115", ("request", "n", "ms")),
        FaultKind("wrong-dp", "wrong-dp:prefill|decode,dp=N", "router", "a leg goes to another DP rank than it says",
                  "llm-d-router#2094", ("request", "dp")),
        FaultKind("stop-heartbeat", "stop-heartbeat:prefill|decode,ms=N", "registration", "an instance stops registering", "vllm-router forgets after 5 s",
                  ("ms",)),
        FaultKind("stale-registration", "stale-registration:prefill|decode,tp=N", "registration",
                  "the router uses what an instance registered before: `tp`, `dp`, or ports N off; `for` ms long",
                  "router#192, and the toy proxy never forgets an instance", ("tp", "dp", "port", "for")),
    )
}  # fmt: skip
_FORMER = ("tp", "dp", "port")

_TARGETS: dict[str, tuple[str, ...]] = {
    "notice": MESSAGES,
    "transfer": ("write", "read"),
    "router": ("prefill", "decode"),
    "registration": ("prefill", "decode"),
}


class EventFault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"sender": "from", "receiver": "to", "for_ms": "for"},
):
    """One fault of an event kind. `target` is a message, `write`/`read`, a rank, a request or a side, as the kind says.

    It fires on events that match `from`, `to`, `request`, `layer` and lie after `after` ms: on the `n`-th of them
    (0 is the first), or as `pattern` says ("fpf": fail, pass, fail, then pass), or, without either, on every one.
    """

    kind: str
    target: str
    sender: str | None = None
    receiver: str | None = None
    request: int | None = None
    layer: int | None = None
    n: int | None = None
    pattern: str | None = None
    after: float = 0.0
    ms: float | None = None
    for_ms: float | None = None
    port: int | None = None
    status: str | None = None
    fraction: float | None = None
    times: int | None = None
    at: str | None = None
    dp: int | None = None
    factor: float | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        kind = EVENT_KINDS.get(self.kind)
        if kind is None:
            raise FaultSyntaxError(f"no fault kind {self.kind!r}; {near(self.kind, EVENT_KINDS)}", "kind")
        given = _given(self)
        for name, value in given.items():
            if name not in kind.params:
                raise FaultSyntaxError(f"{self.kind} takes no {name!r}; use {kind.syntax}", name)
            if problem := _unfit(name, value):
                raise FaultSyntaxError(problem, name)
        choices = _TARGETS.get(kind.point, ("prefill", "decode") if self.kind == "delay-step" else ())
        if choices and self.target not in choices:
            raise FaultSyntaxError(f"{self.kind} can't aim at {self.target!r}; {near(self.target, choices)}", "target")
        if "REQUEST" in kind.syntax and not _REQUEST.fullmatch(self.target):
            raise FaultSyntaxError(f"{self.kind} aims at a request number, not {self.target!r}; use {kind.syntax}", "target")
        if self.kind == "stale-registration":
            self._check_former(given)
            return
        for needed in ("ms", "for", "port", "fraction", "factor", "dp", "at"):
            if f"{needed}=" in kind.syntax and needed not in given:
                raise FaultSyntaxError(f"{self.kind} needs {needed!r}; use {kind.syntax}")

    def _check_former(self, given: dict[str, Any]) -> None:
        """What was registered before: at least one number, and no instance has 0 DP ranks."""
        if not any(name in given for name in _FORMER):
            raise FaultSyntaxError(f"{self.kind} needs what was registered before, {', '.join(_FORMER[:-1])} or {_FORMER[-1]};"
                                   f" use {EVENT_KINDS[self.kind].syntax}")  # fmt: skip
        if self.dp == 0:
            raise FaultSyntaxError("dp=0 is out of range; use 1 to 255", "dp")

    def __str__(self) -> str:
        return ",".join([f"{self.kind}:{self.target}", *(f"{name}={_plain(value)}" for name, value in _given(self).items())])

    def matches(self, target: str, sender: str, receiver: str, request: int, layer: int, now_ms: float) -> bool:
        """Whether an event is one of those that this fault counts."""
        return (
            self.target == target
            and self.sender in (None, sender, sender[:1])
            and self.receiver in (None, receiver, receiver[:1])
            and self.request in (None, request)
            and self.layer in (None, layer)
            and now_ms >= self.after
        )

    def fires_on(self, occurrence: int) -> bool:
        """Whether it fires on its `occurrence`-th matching event (0 is the first)."""
        if self.n is not None:
            return occurrence == self.n
        if self.pattern is not None:
            return self.pattern[occurrence : occurrence + 1] == "f"
        return True


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _given(fault: EventFault) -> dict[str, Any]:
    """The parameters that were given, under the names that people write."""
    fields = msgspec.structs.fields(EventFault)
    given = {field.encode_name: getattr(fault, field.name) for field in fields if field.name not in ("kind", "target")}
    defaults = {field.encode_name: field.default for field in fields}
    return {name: value for name, value in given.items() if value != defaults[name]}


def _unfit(name: str, value: Any) -> str:
    """Why a parameter can't have this value; empty if it can."""
    if name in _RANGES:
        low, high = _RANGES[name]
        return "" if low <= value <= high else f"{name}={_plain(value)} is out of range; use {low} to {high}"
    if name == "fraction" and not 0 < value < 1:
        return f"fraction={value:g} is out of range; use a number between 0 and 1, such as 0.5"
    if name == "pattern" and (not value or set(value) - set("fp") or len(value) > _LONGEST_PATTERN):
        return f"pattern={value!r} is no pattern; use f (fail) and p (pass), such as fpf"
    choices = {"status": STATUSES, "at": ABORT_AT}.get(name, ())
    if choices and value not in choices:
        return f"{name}={value!r} is not one of its values; {near(value, choices)}"
    return ""


def parse_event_fault(text: str) -> EventFault:
    """Read `KIND:TARGET[,name=value…]`, such as `drop-notice:write_done,to=D3`. Raises FaultSyntaxError."""
    kind, _, rest = text.partition(":")
    syntax, params = EVENT_KINDS[kind].syntax, EVENT_KINDS[kind].params
    target, *parts = rest.split(",")
    if not target:
        raise FaultSyntaxError(f"{text!r} aims at nothing; use {syntax}")
    fields: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in params:
            hint = near(name, params, "it takes") if params else f"use {syntax}"
            raise FaultSyntaxError(f"{kind} takes no {name!r} in {text!r}; {hint}")
        if not equals or name in fields:
            raise FaultSyntaxError(f"can't read {part!r} in {text!r}; give {name} once, with a value")
        try:
            fields[name] = _READERS[name](value)
        except ValueError as error:
            example = "1" if _READERS[name] is plain_int else "1.5"
            raise FaultSyntaxError(f"{error} in {text!r}; write {name}={example}") from None
    try:
        return msgspec.convert({"kind": kind, "target": target, **fields}, EventFault)
    except msgspec.ValidationError as error:
        raise FaultSyntaxError(f"{text!r}: {error.__cause__ or error!s}") from None
