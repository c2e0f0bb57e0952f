"""The kinds of event, and the named fields that some of them have beside time, actor, peer, request and layer.

Findings and checkers ask for fields. The words of `str(fields)` are for people: stories, timelines, findings' texts.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvcover.sim.errors import PeerRefusal

KINDS: dict[str, str] = {
    "leg_sent": "the router sent a leg",
    "fault_fired": "a planned fault changed something",
    "bound": "a listener bound its port",
    "bind_failed": "the port was taken: the rank never becomes ready; peer: who has it",
    "blocks_ready_sent": "decode's scheduler told a prefill rank its blocks",
    "blocks_ready": "a prefill rank was told decode's blocks",
    "poisoned": "a message that the role can't handle ended the notify thread for good",
    "undelivered": "a message went to a port that nobody bound, or to a rank that hears no more",
    "dialled": "a handshake reached a rank; peer: the rank that answered",
    "dial_dead": "a handshake went to a port that nobody bound: it waits for ever",
    "map_refused": "the rank map raised",
    "stalled": "a forward waited a whole transfer timeout for a handshake",
    "wrote": "one layer of one transfer landed at a decode rank",
    "read": "one layer of one transfer was read into a decode rank",
    "transfer_failed": "a batch was refused or failed",
    "task_failed": "a write task raised; the transfer is marked done without a message",
    "write_done_sent": "a prefill rank told a decode rank that its blocks are written",
    "write_failed_sent": "a prefill rank told a decode rank that nothing was or will be written",
    "blocks_ready_again": "a prefill rank was told decode's blocks a second time and starts counting anew",
    "aborted": "the client went away",
    "preempted": "decode's scheduler took a request's blocks",
    "forgotten": "the router no longer knows an instance",
    "redirected": "the router sends a request to another instance than it would have",
    "allocated": "an engine gave a request its blocks",
    "sealed_short": "a prefill rank sealed a transfer with fewer writes than layers",
    "short": "decode used cells that were missing or wrong",
    "used_early": "decode used a layer whose read landed after that; peer: who was read (a real run that sees both times)",
    "stray": "a batch changed cells of another request or of a free block",
    "lost": "the router gave up on a request",
    "settled": "who moved the data waited until batches of a request were over: those of one layer, or (no layer) all of them",
    "write_done": "a decode rank got a write_done; peer: who sent it",
    "told": "a decode rank was told, or found, that its blocks are complete",
    "told_failed": "a decode rank was told that its blocks never come",
    "expired": "deferred write tasks of a prefill rank ran out of time",
    "release_sent": "a decode rank released a prefill rank's blocks",
    "release": "a prefill rank was told that its blocks were read",
    "released": "a prefill rank reported that it no longer needs the blocks",
    "freed": "an engine freed the blocks of a request",
    "reaped": "prefill's scheduler freed blocks whose release never came",
    "go": "decode uses its cells",
    "put_off": "the step handshakes, and reads for another request: this one's read waits for a later step that reads",
    "recompute": "decode prefills the request itself",
    "load_failed": "the request's KV will not come, and decode prefills it itself",
    "refused": "an engine refused the request before anything moved",
    "request_failed": "the request ended with an error",
    "ended": "the request ended with tokens",
    "crashed": "an engine or its step died",
    "restarted": "an engine that died is back, with the same ports and new memory",
    "unreachable": "the router could not send a leg: the engine is down",
    "stuck": "a rank of a real run never came up, or never came back from a step",
    "stands": "where a rank of a real run stood when nothing moved any more, and a request had not ended",
}


class Fields(msgspec.Struct, frozen=True):
    """The named fields of a kind of event. `str` of them is what people read."""


class LegSent(Fields, frozen=True):
    """Of `leg_sent`: the `kv_transfer_params` as they left."""

    params: dict[str, Any]

    def __str__(self) -> str:
        return str(self.params)


class FaultActed(Fields, frozen=True):
    """Of `fault_fired`: the fault as people write it, and the point at which it acts."""

    fault: str
    point: str

    @property
    def kind(self) -> str:
        """The kind of fault: what stands before its target."""
        return self.fault.partition(":")[0]

    def __str__(self) -> str:
        return self.fault


class Listener(Fields, frozen=True):
    """Of `bound` and `bind_failed`: the address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Sent(Fields, frozen=True):
    """Of the messages that are sent: the port that they go to, whoever bound it."""

    port: int

    def __str__(self) -> str:
        return f"port {self.port}"


class Counted(Fields, frozen=True):
    """Of `write_done` and `released`: how many messages make the transfer complete at this rank."""

    wanted: int

    def __str__(self) -> str:
        return f"one of {self.wanted}" if self.wanted > 1 else ""


class Dial(Fields, frozen=True):
    """Of `dialled` and `dial_dead`: the port, and the rank that the dialler means there; None: nobody can tell."""

    port: int
    dp: int | None = None
    tp: int | None = None

    def __str__(self) -> str:
        return f"port {self.port}" if self.dp is None else f"port {self.port} for dp{self.dp} tp{self.tp}"


class Message(Fields, frozen=True):
    """Of `undelivered` and `poisoned`: what message, and where to if nobody was there."""

    what: str
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.what

    @property
    def place(self) -> str:
        """The address; empty if a rank was there."""
        return f"{self.host}:{self.port}" if self.port else ""


class Raised(Fields, frozen=True):
    """Of `crashed`, `map_refused` and `task_failed`: the exception's class and text, the policy that made it one.

    `fault` is the planned fault that ended a process; then nothing was raised. Real runs say in which call on the connector
    it was, and in `broken` if the error is of a kind that no protocol makes: a missing name or library, a machine in need.
    """

    error: str
    text: str
    policy: str = ""
    fault: str = ""
    call: str = ""
    broken: str = ""

    @classmethod
    def by(cls, refusal: PeerRefusal, policy: str = "") -> Raised:
        """What a refusal of the connector looks like; `policy` if the refusal doesn't know its own."""
        return cls(refusal.error, refusal.text, refusal.policy or policy)

    def __str__(self) -> str:
        said = f"{self.error}: {' '.join(self.text.split())[:300]}" if self.error else self.text
        where = ", ".join(each for each in (self.call and f"in {self.call}", self.at) if each)
        return f"{said} ({where})" if where else said

    @property
    def at(self) -> str:
        """File and line of the connector, where they are known."""
        return ""


class RaisedAt(Raised, frozen=True):
    """As `Raised`, of a real run: with the file and line of the innermost frame in the connector."""

    place: str = ""

    @property
    def at(self) -> str:
        return self.place


class Failed(Fields, frozen=True):
    """Of `transfer_failed`: MoRI's message, and where it comes from.

    bounds: outside of the registered memory; queue: the send queue has no room; gone: the peer's process is dead;
    planned: a fault of the scenario; library: whatever the MoRI of a real run says;
    timeout: nothing was heard of it within the transfer timeout.
    """

    error: str
    source: Literal["bounds", "queue", "gone", "planned", "library", "timeout"]

    def __str__(self) -> str:
        return self.error


class Stall(Fields, frozen=True):
    """Of `stalled`: for how long (ns); None for the vote of a handshake, which has no limit."""

    for_ns: int | None

    def __str__(self) -> str:
        return "handshake vote" if self.for_ns is None else f"{self.for_ns} ns"


class Sealed(Fields, frozen=True):
    """Of `sealed_short`: so many writes make up a transfer of so many layers."""

    writes: int
    layers: int

    def __str__(self) -> str:
        return f"{self.writes} of {self.layers} layers"


class Short(Fields, frozen=True):
    """Of `short`: cells that were right, of those that were needed."""

    covered: int
    needed: int

    def __str__(self) -> str:
        return f"{self.covered} of {self.needed} cells were right"


class Stray(Fields, frozen=True):
    """Of `stray`: cells that changed."""

    cells: int

    def __str__(self) -> str:
        return f"{self.cells} cells"


class Landed(Fields, frozen=True):
    """Of `wrote` and `read`, where they are out of the ordinary: the batch missed its request's blocks."""

    astray: bool

    def __str__(self) -> str:
        return "astray" if self.astray else ""


ASTRAY = Landed(True)


class Took(Fields, frozen=True):
    """Of `wrote` and `read` of a real run, whose time is that of the post: how long the bytes were under way (ns)."""

    ns: int

    def __str__(self) -> str:
        return f"took {self.ns} ns"


class Lost(Fields, frozen=True):
    """Of `lost`: why the router gave up, by kind and in words."""

    reason: Literal["unsent", "rejected", "down", "no_answer", "never_started", "died"]
    text: str

    def __str__(self) -> str:
        return self.text


class Stuck(Fields, frozen=True):
    """Of `stuck` and `stands`: whether the rank ever came up, and what it did last."""

    started: bool
    last_step: str

    def __str__(self) -> str:
        return self.last_step


class Why(Fields, frozen=True):
    """Of `refused`, `request_failed` and `load_failed`: the reason in words."""

    text: str

    def __str__(self) -> str:
        return self.text
