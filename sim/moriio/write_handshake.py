"""Handshakes of a prefill rank in WRITE: one thread, which dials one decode rank after another."""

from __future__ import annotations

from typing import Any

from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.kernel.events import Dial
from kvcover.sim.kernel.network import Address
from kvcover.sim.moriio.rank import AgentKey, Rank
from kvcover.sim.moriio.write_job import Job
from kvcover.sim.releases.maps import MOST_RANKS
from kvcover.sim.releases.ports import fold
from kvcover.sim.releases.sizes import as_int


class Handshakes:
    """The handshake thread of one prefill rank; a port that nobody bound blocks it for ever."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.context = rank.context
        self.name = rank.name
        self._free_at = 0
        self._offset = rank.me.release.call("dial")

    def dial(self, job: Job) -> None:
        """Queue handshakes with every DP rank of the job's peer. After the last one the peer is ready, and has the job queued."""
        clock, leg, peer = self.context.clock, job.leg, job.peer
        assert leg is not None
        handshake_ns = self.context.timing.handshake_ns
        at = max(clock.now, self._free_at)
        reached: list[tuple[AgentKey, Any, Dial]] = []
        for key in (key for dp in range(min(as_int(leg.dp_size), MOST_RANKS)) for key in job.keys(dp)):
            if at >= NEVER:
                break
            address = self._address(job, key)
            rank = self.context.network.owner(address)
            dial = Dial(address[1], key[0], job.dialled_tp(key))
            if rank is None:
                self.context.log("dial_dead", self.name, request=job.transfer.index, fields=dial)
                self._free_at = at = NEVER
                self.context.network.when_bound(address, lambda: self._redial(job))
            else:
                self._free_at = at = at + handshake_ns
                reached.append((key, rank, dial))
        peer.ready_at = min(peer.ready_at, at)
        finished = at < NEVER

        def answered(position: int) -> None:
            """One handshake is done; after the last one the request is ready, in the same instant."""
            if self.rank.gone:
                return
            if position < len(reached):
                key, rank, dial = reached[position]
                if key not in peer.agents:
                    peer.agents[key] = rank
                    self.context.log("dialled", self.name, rank.name, job.transfer.index, fields=dial)
            if position + 1 < len(reached):
                clock.after(handshake_ns, lambda _event: answered(position + 1))
            elif finished:
                peer.queue.append(job)
                peer.ready = True

        if reached:
            first = (self._free_at if finished else clock.now + handshake_ns * len(reached)) - handshake_ns * (len(reached) - 1)
            clock.after(first - clock.now, lambda _event: answered(0))
        elif finished:
            answered(0)

    def _redial(self, job: Job) -> None:
        """The port for which the thread waited was bound after all."""
        if self.rank.gone:
            return
        self._free_at = self.context.clock.now
        self.dial(job)

    def _address(self, job: Job, key: AgentKey) -> Address:
        """The address that this release dials for `key`."""
        leg = job.leg
        assert leg is not None
        offset = self._offset(fold(key[0], leg.pod_dp), job.dialled_tp(key), as_int(leg.peer_tp))
        return leg.pod_host(key[0]), leg.handshake_port + offset
