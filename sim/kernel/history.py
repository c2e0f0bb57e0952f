"""What happened: one append-only list of typed events. Results, findings and digests are views of it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec


class Event(NamedTuple):
    """One event: virtual time in ns, kind (see `KINDS`), who did it, to whom, for which request, in which layer."""

    time_ns: int
    kind: str
    actor: str
    peer: str = ""
    request: int = -1
    layer: int = -1
    detail: str = ""


KINDS: dict[str, str] = {
    "leg_sent": "the router sent a leg; detail: its kv_transfer_params",
    "fault_fired": "a planned fault changed something; detail: the fault",
    "bound": "a listener bound its port",
    "bind_failed": "the port was taken: the rank never becomes ready",
    "blocks_ready_sent": "decode's scheduler told a prefill rank its blocks",
    "blocks_ready": "a prefill rank was told decode's blocks",
    "poisoned": "a message that the role can't handle ended the notify thread for good",
    "undelivered": "a message went to a port that nobody bound",
    "dialled": "a handshake reached a rank; peer: the rank that answered",
    "dial_dead": "a handshake went to a port that nobody bound: it waits for ever",
    "map_refused": "the rank map raised",
    "stalled": "a forward waited a whole transfer timeout for a handshake",
    "wrote": "one layer of one transfer landed at a decode rank",
    "read": "one layer of one transfer was read into a decode rank",
    "transfer_failed": "a batch was refused or failed; detail: MoRI's message",
    "task_failed": "a write task raised; the transfer is marked done without a message",
    "write_done_sent": "a prefill rank told a decode rank that its blocks are written",
    "write_failed_sent": "a prefill rank told a decode rank that nothing was or will be written",
    "blocks_ready_again": "a prefill rank was told decode's blocks a second time and starts counting anew",
    "aborted": "the client went away",
    "preempted": "decode's scheduler took a request's blocks",
    "forgotten": "the router no longer knows an instance",
    "allocated": "an engine gave a request its blocks",
    "sealed_short": "a prefill rank sealed a transfer with fewer writes than layers; detail: how many",
    "short": "decode used cells that were missing or wrong; detail: how many of those it needs were there",
    "stray": "a batch changed cells of another request or of a free block; detail: how many",
    "lost": "the router gave up on a request",
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
    "load_failed": "the request's KV will not come, and decode prefills it itself; detail: why",
    "refused": "an engine refused the request before anything moved",
    "request_failed": "the request ended with an error",
    "ended": "the request ended with tokens",
    "crashed": "an engine or its step died; detail: the exception",
    "restarted": "an engine that died is back, with the same ports and new memory",
    "unreachable": "the router could not send a leg: the engine is down",
}


Row = tuple[int, str, str, str, int, int, str]


class History:
    """The events of a run, in the order in which they happened."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._by_kind: dict[str, list[Row]] = {}
        self._indexed = 0

    def add(
        self, time_ns: int, kind: str, actor: str, peer: str = "", request: int = -1, layer: int = -1, detail: str = ""
    ) -> None:
        self.rows.append((time_ns, kind, actor, peer, request, layer, detail))

    def __len__(self) -> int:
        return len(self.rows)

    def events(self, *kinds: str) -> list[Event]:
        """Events of these kinds (all kinds when none is named), in order."""
        return [Event(*row) for row in self.rows_of(*kinds)]

    def rows_of(self, *kinds: str) -> list[Row]:
        """As `events`, as plain tuples."""
        if not kinds:
            return self.rows
        if self._indexed != len(self.rows):
            self._index()
        rows = [row for kind in kinds for row in self._by_kind.get(kind, ())]
        if len(kinds) > 1:
            rows.sort(key=lambda row: row[0])
        return rows

    def _index(self) -> None:
        """Sort the rows by kind: reports ask for few kinds, and most rows are layers that landed."""
        self._by_kind = {}
        for row in self.rows:
            self._by_kind.setdefault(row[1], []).append(row)
        self._indexed = len(self.rows)

    def last_ns(self) -> int:
        return self.rows[-1][0] if self.rows else 0

    def digest(self) -> str:
        """Same scenario and seed, same digest, in any process."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.rows), digest_size=16).hexdigest()
