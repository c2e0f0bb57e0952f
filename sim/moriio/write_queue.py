"""What becomes of a batch that a prefill rank posts: the NIC, the send queue, planned faults, and its landing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvcover.sim.cache.ledger import Copy
from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.kernel.events import Failed
from kvcover.sim.moriio.effects import BROKEN, broken_session, transfer_effect
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.write_job import Job, Wire
from kvcover.sim.moriio.write_plan import WritePlan


class WriteQueue:
    """The batches of one prefill rank. `over(job)` is called when one of a sealed job is over, well or not."""

    def __init__(self, rank: Rank, plan: WritePlan, over: Callable[[Job], None]) -> None:
        self.rank = rank
        self.context = rank.context
        self.name = rank.name
        self._plan = plan
        self._over = over
        self._nic = rank.nic
        self._layers = self.context.geometry.layers
        rdma = self.context.setup.scenario.rdma
        self._depth = rdma.sq_depth * rdma.queue_pairs
        self._faulted = self.context.injector.plans("transfer")

    def post(self, job: Job, wire: Wire, layer: int) -> None:
        """Post the batch of one layer to one target."""
        rank, copy = wire.rank, wire.copy
        assert rank is not None
        if copy is None:
            self.fail(job, layer, Failed("length out of range", "bounds"))
        elif self._faulted or rank.gone or wire.entries * self._layers > self._depth:
            self._post_carefully(job, wire, rank, copy, layer)
        else:
            clock = self.context.clock
            now = clock.now
            land = self._nic.occupy(rank.nic, now, wire.busy_ns) + wire.tail_ns
            if land > job.last_land:
                job.last_land = land
            job.in_flight += 1
            self.context.note_post("wrote", land, self.name, rank.name, job.transfer.index, layer)
            clock.after(land - now, partial(self._landed, job, rank, copy, layer))

    def fail(self, job: Job, layer: int, failed: Failed) -> None:
        """A batch of the job was refused, or ended badly."""
        job.error = failed.error
        if self.rank.gone:
            return
        self.context.log("transfer_failed", self.name, request=job.transfer.index, layer=layer, fields=failed)

    def _post_carefully(self, job: Job, wire: Wire, rank: Rank, copy: Copy, layer: int) -> None:
        """Post one batch where the send queue may be full, or a planned fault may act."""
        clock = self.context.clock
        now = clock.now
        rdma = self.context.setup.scenario.rdma
        room_at = self._nic.queue(now, wire.entries, self._depth)
        if wire.entries > self._depth:
            self.fail(job, layer, Failed("SQ request exceeds capacity", "queue"))
            return
        if room_at - now > rdma.sq_wait_s * 1e9:
            self.fail(job, layer, Failed("SQ full", "queue"))
            return
        land = self._nic.occupy(rank.nic, room_at, wire.busy_ns) + wire.tail_ns
        self._nic.queued(land, wire.entries)
        if rank.gone:
            effect = broken_session(self.context)
        else:
            effect = transfer_effect(self.context, "write", self.name, rank.name, job.transfer.index, layer, land)
        if effect.refused:
            self.fail(job, layer, Failed(effect.refused, "planned"))
            return
        job.in_flight += 1
        job.last_land = max(job.last_land, effect.done_at)
        if effect.land_at is not None:
            part = copy.part(effect.fraction)
            self.context.note_post("wrote", effect.land_at, self.name, rank.name, job.transfer.index, layer)
            clock.after(effect.land_at - now, lambda _event: self._land(job, rank, part, layer))
        failed = Failed(effect.error, "gone" if rank.gone else "planned") if effect.error else None
        if effect.done_at < NEVER:
            clock.after(effect.done_at - now, partial(self._completed, job, layer, failed))

    def _completed(self, job: Job, layer: int, failed: Failed | None, _event: Any) -> None:
        """MoRI says that a batch is over, well or not."""
        job.in_flight -= 1
        if failed is not None:
            self.fail(job, layer, failed)
        if job.sealed is not None:
            self._over(job)

    def _landed(self, job: Job, rank: Rank, copy: Copy, layer: int, _event: Any) -> None:
        self._land(job, rank, copy, layer)
        job.in_flight -= 1
        if rank.gone:
            self.fail(job, layer, Failed(BROKEN, "gone"))
        if job.sealed is not None:
            self._over(job)

    def _land(self, job: Job, rank: Rank, copy: Copy, layer: int) -> None:
        """The NIC read prefill's blocks and wrote decode's: what lands is what prefill's blocks hold at that moment."""
        if self.rank.gone or rank.gone:
            return
        if job.transfer.source_reused:
            copy = self._read_again(job, rank, copy, layer)
        rank.land(layer, copy, job.transfer, self.name, "wrote")

    def _read_again(self, job: Job, rank: Rank, copy: Copy, layer: int) -> Copy:
        """Prefill gave the blocks to another request before the NIC read them: what lands is what is there now."""
        wires = self._plan.wires(job, self.rank.me.places[layer][0])
        now = next((wire.copy for wire in wires if wire.rank is rank and wire.copy is not None), copy)
        return now.part(len(copy.where) / len(now.where))
