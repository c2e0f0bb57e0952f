"""The life of a transfer at one prefill rank in WRITE mode, from the forward's first layer to its end.

It follows the connector's worker: one handshake thread, a write task a layer, tasks deferred until decode's blocks are
known, a count sealed after the forward, then one message to each decode rank that the release would tell. Errors end a
transfer here; whether decode hears of that is up to the release.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from kvcover.sim.cache.ledger import Codes
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import Failed, Raised, Sealed, Stall
from kvcover.sim.moriio.legs import Leg, check_hashable
from kvcover.sim.moriio.rank import Rank, Tables
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.moriio.write_handshake import Handshakes
from kvcover.sim.moriio.write_job import Job, Peer
from kvcover.sim.moriio.write_notices import Notices
from kvcover.sim.moriio.write_plan import WritePlan
from kvcover.sim.moriio.write_queue import WriteQueue
from kvcover.sim.releases.maps import MOST_RANKS
from kvcover.sim.releases.sizes import as_int


class Writer:
    """The write side of one prefill rank, whose engine's blocks hold `contents`; `ended(job)` reports a transfer finished."""

    def __init__(self, rank: Rank, contents: Codes, ended: Callable[[Job], None]) -> None:
        self.context = rank.context
        self.me = rank.me
        self.name = rank.name
        self._layers = self.context.geometry.layers
        self._ended = ended
        self._handshakes = Handshakes(rank)
        self._plan = WritePlan(rank, contents)
        self._queue = WriteQueue(rank, self._plan, self._finalize)
        self._notices = Notices(rank)
        self.peers: dict[tuple[str, int], Peer] = {}
        # Closed jobs stay, so that what comes late is ignored: the connector keeps the last 4096 ids, as many as a
        # scenario has requests.
        self.jobs: dict[str, Job] = {}
        self._thread_free_at = 0
        self._tasks: deque[tuple[Job, int]] = deque()  # while the write thread waits for another transfer to end

    def job(self, transfer: Transfer, leg: Leg) -> Job:
        """The job of a transfer that prefill's forward is about to write. Raises PeerRefusal for an id that can be no key."""
        check_hashable(leg.transfer_id)
        job = self._job_of(str(leg.transfer_id), transfer)
        if job.transfer.prefill_tables is None:  # announced of another request under this id, which waits for room here
            transfer.own_blocks_only &= job.blocks is None
            job.transfer = transfer
        job.leg = self._notices.last_leg = leg
        job.peer = self.peers.setdefault((leg.host, leg.handshake_port), Peer())
        return job

    def _job_of(self, key: str, transfer: Transfer) -> Job:
        if key not in self.jobs:
            self.jobs[key] = Job(transfer, key)
        return self.jobs[key]

    def end(self) -> None:
        """The process died: no transfer goes on."""
        for job in self.jobs.values():
            job.closed = True

    # -- in the forward ---------------------------------------------------------------------------------------

    def save(self, jobs: list[Job], layer: int) -> int:
        """What `save_kv_layer` does for a batch; returns how many ns the forward waits for a handshake (0: none)."""
        for job in jobs:
            if job.open or self._open(job):
                self._schedule(job, layer)
        peer = jobs[-1].peer
        if peer.ready:
            if peer.queue:
                self._schedule(peer.queue.popleft(), layer)
            return 0
        return min(peer.ready_at + 1 - self.context.clock.now, self.context.setup.transfer_timeout_ns)

    def after_wait(self, jobs: list[Job], layer: int, waited_ns: int) -> None:
        """The forward waited for a handshake: write what it held up, or go on without."""
        peer = jobs[-1].peer
        if peer.ready and peer.queue:
            self._schedule(peer.queue.popleft(), layer)
        elif not peer.ready:
            jobs[-1].transfer.timer_fired = True
            self.context.log("stalled", self.name, request=jobs[-1].transfer.index, layer=layer, fields=Stall(waited_ns))

    def held_up(self, jobs: list[Job], layer: int) -> bool:
        """Whether a second call for this layer still has something to do, or to wait for."""
        return any(not job.closed and (layer not in job.scheduled or not job.peer.ready) for job in jobs)

    def seal(self, jobs: list[Job]) -> Generator[Any, None, None]:
        """The forward is over: as many writes as were scheduled make the transfer. With none it is never finished.

        A transfer whose writes are all posted is finished here, on the forward's thread: an error raises out of it.
        """
        clock = self.context.clock
        for job in jobs:
            if self.me.release.sealing == "every_layer" and len(job.scheduled) < self._layers and not job.closed:
                self._close_failed(job)  # no session came in time for some layer
            elif job.scheduled:
                job.sealed = len(job.scheduled)
                if job.sealed < self._layers and not job.closed:
                    sealed = Sealed(job.sealed, self._layers)
                    self.context.log("sealed_short", self.name, request=job.transfer.index, fields=sealed)
        for job in jobs:
            if job.closed or job.sealed is None or job.writes_done < job.sealed:
                continue
            wait = min(job.last_land + 1 - clock.now, self.context.setup.transfer_timeout_ns)
            if job.in_flight and not job.error and wait > 0:
                job.waiting = job.in_forward = True
                yield clock.timeout(wait)
                job.in_forward = False
            self._end_in_forward(job)

    def _end_in_forward(self, job: Job) -> None:
        if job.closed:
            return
        if not job.error and not job.in_flight:
            self._finalize(job)
        elif self.me.release.write_failure_in_forward == "raises":
            raise PeerRefusal("TransferError", job.error or "transfer timeout", "write_failure_in_forward")
        else:
            self._close_failed(job)

    def _open(self, job: Job) -> bool:
        """Map this rank onto the peer and see whether its sessions are there; else queue handshakes."""
        refused = self._plan.find_targets(job)
        if refused is not None:
            self.context.log("map_refused", self.name, request=job.transfer.index, fields=Raised.by(refused))
            job.peer.ready = True
            job.peer.queue.append(job)
            return False
        if not job.targets:
            job.peer.ready = True  # another rank writes all that this one holds
        # Readiness is judged on the first DP rank alone.
        job.open = all(key in job.peer.agents for key in job.keys(0)) or not job.targets
        if not job.open:
            self._handshakes.dial(job)
        return job.open

    # -- write tasks ------------------------------------------------------------------------------------------

    def _schedule(self, job: Job, layer: int) -> None:
        if job.closed or layer in job.scheduled:
            return
        job.scheduled.add(layer)
        if job.blocks is not None:
            self._write(job, layer)
            return
        if not job.deferred:
            self.context.clock.after(self.context.setup.defer_timeout_ns, lambda _event: self._expire(job))
        job.deferred.append(layer)

    def blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: Tables, decode_dp: int) -> None:
        """Decode's scheduler told us where the blocks go. Ignored when the transfer is over here."""
        job = self._job_of(str(transfer_id), transfer)
        if job.closed:
            return
        if job.blocks is not None:
            if self.me.release.blocks_ready_again == "ignored":
                return
            self.context.log("blocks_ready_again", self.name, request=transfer.index)
        job.transfer.own_blocks_only &= transfer is job.transfer  # two requests under one id: these are another's blocks
        job.blocks, job.decode_dp, job.writes_done, job.wires = blocks, decode_dp, 0, None
        deferred, job.deferred = job.deferred, []
        for layer in deferred:
            if not job.closed:
                self._write(job, layer)

    def drop(self, transfer_id: Any, transfer: Transfer) -> None:
        """Decode needs nothing: drop what is planned for the transfer (its tasks find it over)."""
        job = self._job_of(str(transfer_id), transfer)
        job.closed = True

    def _write(self, job: Job, layer: int) -> None:
        """One write task: a batch to every target. An error ends the transfer at this rank."""
        now = self.context.clock.now
        if now < self._thread_free_at or self._tasks:
            self._wait_for_thread(job, layer)
            return
        if job.wires is None:
            job.wires = [self._plan.wires(job, group) for group in range(len(self.me.groups))]
            if job.transfer.posted_ns < 0:
                job.transfer.posted_ns = now
        for wire in job.wires[self.me.places[layer][0]]:
            if wire.refusal is not None or wire.rank is None:
                assert wire.refusal is not None
                self.context.log("task_failed", self.name, request=job.transfer.index, layer=layer, fields=Raised.by(wire.refusal))
                self._close_failed(job)
                return
            self._queue.post(job, wire, layer)
        job.writes_done += 1
        if job.sealed is not None:
            self._finalize(job)

    def _wait_for_thread(self, job: Job, layer: int) -> None:
        """The write thread waits for another transfer to end; this task waits behind it."""
        if not self._tasks:
            clock = self.context.clock
            clock.after(self._thread_free_at - clock.now, lambda _event: self._next_tasks())
        self._tasks.append((job, layer))

    def _next_tasks(self) -> None:
        tasks, self._tasks = self._tasks, deque()
        for job, layer in tasks:
            if not job.closed:
                self._write(job, layer)

    # -- the end of a transfer --------------------------------------------------------------------------------

    def _finalize(self, job: Job) -> None:
        """When every sealed write is posted: wait for them, tell decode, report."""
        if job.closed or job.sealed is None or job.writes_done < job.sealed:
            return
        clock, timeout_ns = self.context.clock, self.context.setup.transfer_timeout_ns
        patient = self.me.release.write_wait == "all_statuses" or not job.error
        if job.in_flight and patient:
            if not job.waiting:
                job.waiting = True
                until = min(job.last_land, clock.now + timeout_ns)
                self._thread_free_at = max(self._thread_free_at, until)
                if job.last_land > until:
                    clock.after(timeout_ns, lambda _event: self._give_up(job))
            return
        if job.error and job.in_forward:
            return
        if patient and job.last_land:
            self.context.log("settled", self.name, request=job.transfer.index)
        if job.error:
            self._close_failed(job)
        else:
            self._notices.done(job)
            self._close(job)

    def _give_up(self, job: Job) -> None:
        if not job.closed:
            self._queue.fail(job, -1, Failed("transfer timeout", "timeout"))
            self._close_failed(job)

    def _close_failed(self, job: Job) -> None:
        """The transfer went wrong at this rank; whether decode hears of it is up to the release."""
        self._close(job)
        if self.me.release.write_failure == "write_failed":
            self._notices.failed(job, job.decode_dp)

    def _close(self, job: Job) -> None:
        """Nothing more happens for this transfer here."""
        job.closed = True
        self._ended(job)

    def _expire(self, job: Job) -> None:
        """Decode's blocks never came within the defer timeout."""
        if job.closed or job.blocks is not None:
            return
        job.transfer.timer_fired = True
        self.context.log("expired", self.name, request=job.transfer.index)
        self._close(job)
        if self.me.release.expiry == "write_failed":
            assert job.leg is not None
            for dp in range(min(max(as_int(job.leg.dp_size), 1), MOST_RANKS)):
                self._notices.failed(job, dp)
