"""What a prefill rank knows of a transfer that it writes, and of the decode engine that it writes to."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvcover.sim.cache.ledger import Copy
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.moriio.legs import Leg
from kvcover.sim.moriio.rank import AgentKey, Rank, Tables
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.maps import Target


class Peer:
    """What one prefill rank knows of one decode engine: sessions by (DP rank, TP rank when it writes to several)."""

    def __init__(self) -> None:
        self.agents: dict[AgentKey, Any] = {}
        self.ready = False
        self.ready_at = NEVER
        self.queue: deque[Job] = deque()


class Wire(NamedTuple):
    """One target of a job's layers of one group: the rank reached, the batch of each (None: MoRI refuses it), or why not.

    The NIC is busy for `busy_ns`, the batch has landed `tail_ns` later; `entries` work requests are left after merging.
    """

    rank: Rank | None
    copy: Copy | None
    busy_ns: int
    tail_ns: int
    entries: int = 0
    refusal: PeerRefusal | None = None


class Job:
    """One transfer at one prefill rank. `leg` is None while only decode's blocks are known."""

    def __init__(self, transfer: Transfer, transfer_id: str) -> None:
        self.transfer = transfer
        self.id = transfer_id
        self.leg: Leg | None = None
        self.peer = Peer()
        self.targets: list[Target] = []
        self.open = False  # mapped, and every session it needs is there
        self.closed = False  # terminal: nothing more is written or told
        self.scheduled: set[int] = set()
        self.deferred: list[int] = []
        self.sealed: int | None = None
        # decode's blocks and what was written of them; a second message starts this over
        self.blocks: Tables | None = None
        self.decode_dp = 0
        self.writes_done = 0
        self.wires: list[list[Wire]] | None = None  # by group
        self.in_flight = 0
        self.last_land = 0
        self.error = ""
        self.waiting = False
        self.in_forward = False  # the forward waits for its end, and has it when it is bad

    def keys(self, dp: int) -> list[AgentKey]:
        """The sessions with DP rank `dp` of the peer that the job needs."""
        if len(self.targets) > 1:
            return [(dp, target.tp_rank) for target in self.targets]
        return [(dp, None)]

    def dialled_tp(self, key: AgentKey) -> int:
        """The TP rank that a session of `keys` is dialled for."""
        return key[1] if key[1] is not None else self.targets[0].tp_rank
