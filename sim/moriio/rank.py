"""What every rank of either engine is: a name, a NIC, two listeners, and a notify thread that one wrong message kills."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvcover.sim.cache.ledger import Copy
from kvcover.sim.kernel.events import ASTRAY, Message, Stray
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.endpoint import Endpoint

Tables = list[list[int]]
"""Block ids by block table."""
AgentKey = tuple[int, int | None]
"""A session with a rank of the peer: its DP rank, and its TP rank where there are several of that DP rank."""


class Nic:
    """When a rank's NIC is free to send and to receive, and what its send queue holds.

    Batches that share a NIC, at either end, take it one after another, so that flows of equal batches share it fairly.
    """

    def __init__(self) -> None:
        self.send_free_at = 0
        self.receive_free_at = 0
        self.slowdown = 1.0
        self._queued: deque[tuple[int, int]] = deque()  # (lands at, work requests)
        self._outstanding = 0

    def occupy(self, other: Nic, now: int, busy_ns: int) -> int:
        """Send a batch to the other NIC; returns when its last byte is on its way (ns)."""
        if self.slowdown > 1 or other.slowdown > 1:
            busy_ns = round(busy_ns * max(self.slowdown, other.slowdown))
        start = max(now, self.send_free_at, other.receive_free_at)
        self.send_free_at = other.receive_free_at = start + busy_ns
        return start + busy_ns

    def queue(self, now: int, entries: int, depth: int) -> int:
        """When the send queue has room for a batch of `entries` work requests (ns); `now` if it has it already."""
        while self._queued and self._queued[0][0] <= now:
            self._outstanding -= self._queued.popleft()[1]
        room_at, left = now, self._outstanding
        for lands_at, size in self._queued:
            if left + entries <= depth:
                break
            room_at, left = lands_at, left - size
        return room_at

    def queued(self, lands_at: int, entries: int) -> None:
        """A batch was posted and leaves the queue when it lands."""
        self._queued.append((lands_at, entries))
        self._outstanding += entries


class Rank:
    """TP rank `tp` of DP rank `dp` of `me`.

    A message meant for the other role is a poison: the notify thread logs it and ends for good.
    """

    def __init__(self, context: Context, me: Endpoint, dp: int, tp: int) -> None:
        self.context = context
        self.me = me
        self.dp = dp
        self.tp = tp
        self.name = me.rank_name(dp, tp)
        self.nic = Nic()
        self.deaf = False
        self.gone = False  # the process is dead, and with it its memory
        self.stalls: list[tuple[int, int]] = []  # (from, until) in ns

    def stalled_until(self, now: int) -> int:
        """When a stalled rank moves again (ns); `now` when it is not stalled."""
        for start, end in self.stalls:
            if start <= now < end:
                return end
        return now

    def die(self) -> None:
        """The process ends: it hears and does nothing more. Peers that have a session to it are not told."""
        self.deaf = self.gone = True

    def poison(self, what: str, transfer: Transfer, sender: str) -> None:
        """A message that the notify thread can't handle."""
        self.poisoned_by(what, sender, transfer.index)

    def poisoned_by(self, what: str, sender: str, request: int = -1) -> None:
        """The notify thread ends for good; senders go on sending and never learn."""
        self.deaf = True
        self.context.log("poisoned", self.name, sender, request, fields=Message(what))

    def on_blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: Tables, decode_dp: int) -> None:
        self.poison("remote_blocks at a decode rank", transfer, "D")

    def on_release(self, transfer_id: Any, transfer: Transfer, consumer_tp: int, sender: str) -> None:
        self.poison("release at a decode rank", transfer, sender)

    def on_write_done(self, transfer_id: Any, transfer: Transfer, writers: int, sender: str) -> None:
        self.poison("write_done at a prefill rank", transfer, sender)

    def on_write_failed(self, transfer_id: Any, transfer: Transfer, sender: str) -> None:
        self.poison("write_failed at a prefill rank", transfer, sender)

    def land(self, layer: int, copy: Copy, transfer: Transfer, source: str, kind: str) -> None:
        """Bytes landed at a rank that is nobody's decode rank: all of them are astray."""
        self.context.stray += len(copy.where)
        self.context.log("stray", self.name, source, transfer.index, layer, Stray(len(copy.where)))
        self.context.log(kind, source, self.name, transfer.index, layer, ASTRAY)
