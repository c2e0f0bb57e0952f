"""What one prefill rank does in WRITE mode: handshakes, a write task a layer, deferral, and the end of a transfer.

It follows the connector's worker: one handshake thread, tasks deferred until decode's blocks are known, a count sealed
after the forward, then one message to each decode rank that the release would tell. Errors end a transfer here without
a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcover.sim.cache.batch import Batch, Slice, head_slices, state_slice, whole_blocks
from kvcover.sim.cache.geometry import check_slices
from kvcover.sim.cache.ledger import Copy, SourceCache
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import Dial, Failed, Raised, Sealed, Sent, Stall
from kvcover.sim.moriio.legs import Leg, check_hashable
from kvcover.sim.moriio.rank import Rank, Tables
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.maps import MOST_RANKS, Target
from kvcover.sim.releases.ports import fold
from kvcover.sim.releases.sizes import as_int, non_positive_is_own
from kvcover.sim.scenario.setup import Endpoint

if TYPE_CHECKING:
    from kvcover.sim.moriio.decode import DecodeRank
    from kvcover.sim.moriio.prefill import PrefillRank

NEVER = 1 << 62
BROKEN = "transport retry counter exceeded"
"""The error of a batch to a process that is no longer there."""
AgentKey = tuple[int, int | None]


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

    rank: DecodeRank | None
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


class Writer:
    """The write side of one prefill rank."""

    def __init__(self, rank: PrefillRank) -> None:
        self.rank = rank
        self.world = rank.world
        self.me: Endpoint = self.world.setup.prefill
        self.name = rank.name
        self._nic = rank.nic
        self._layers = self.world.geometry.layers
        rdma = self.world.setup.scenario.rdma
        self._sq_depth = rdma.sq_depth * rdma.queue_pairs
        self.peers: dict[tuple[str, int], Peer] = {}
        # Closed jobs stay, so that what comes late is ignored: the connector keeps the last 4096 ids, as many as a
        # scenario has requests.
        self.jobs: dict[str, Job] = {}
        self.dial_free_at = 0
        self.thread_free_at = 0
        self._tasks: deque[tuple[Job, int]] = deque()  # while the write thread waits for another transfer to end
        self._faulted = self.world.injector.plans("transfer")
        self._last_leg: Leg | None = None
        release = self.me.release
        self._map, self._pair = release.call("write_map"), release.call("write_pairing")
        self._dial_offset, self._port_offset = release.call("dial"), release.call("notify_ports")
        self._known_size, self._done_to = release.call("unknown_tp_map"), release.call("write_done_to")

    def job(self, transfer: Transfer, leg: Leg) -> Job:
        """The job of a transfer that prefill's forward is about to write. Raises PeerRefusal for an id that can be no key."""
        check_hashable(leg.transfer_id)
        job = self._job_of(str(leg.transfer_id), transfer)
        job.leg = self._last_leg = leg
        job.peer = self.peers.setdefault((leg.host, leg.handshake_port), Peer())
        return job

    def _job_of(self, key: str, transfer: Transfer) -> Job:
        if key not in self.jobs:
            self.jobs[key] = Job(transfer, key)
        return self.jobs[key]

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
        return min(peer.ready_at + 1 - self.world.clock.now, self.world.setup.transfer_timeout_ns)

    def after_wait(self, jobs: list[Job], layer: int, waited_ns: int) -> None:
        """The forward waited for a handshake: write what it held up, or go on without."""
        peer = jobs[-1].peer
        if peer.ready and peer.queue:
            self._schedule(peer.queue.popleft(), layer)
        elif not peer.ready:
            jobs[-1].transfer.timer_fired = True
            self.world.log("stalled", self.name, request=jobs[-1].transfer.index, layer=layer, fields=Stall(waited_ns))

    def held_up(self, jobs: list[Job], layer: int) -> bool:
        """Whether a second call for this layer still has something to do, or to wait for."""
        return any(not job.closed and (layer not in job.scheduled or not job.peer.ready) for job in jobs)

    def seal(self, jobs: list[Job]) -> Generator[Any, None, None]:
        """The forward is over: as many writes as were scheduled make the transfer. With none it is never finished.

        A transfer whose writes are all posted is finished here, on the forward's thread: an error raises out of it.
        """
        clock = self.world.clock
        for job in jobs:
            if self.me.release.sealing == "every_layer" and len(job.scheduled) < self._layers and not job.closed:
                self._close_failed(job)  # no session came in time for some layer
            elif job.scheduled:
                job.sealed = len(job.scheduled)
                if job.sealed < self._layers and not job.closed:
                    sealed = Sealed(job.sealed, self._layers)
                    self.world.log("sealed_short", self.name, request=job.transfer.index, fields=sealed)
        for job in jobs:
            if job.closed or job.sealed is None or job.writes_done < job.sealed:
                continue
            wait = min(job.last_land + 1 - clock.now, self.world.setup.transfer_timeout_ns)
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
        refused = self._find_targets(job)
        if refused is not None:
            self.world.log("map_refused", self.name, request=job.transfer.index, fields=Raised.by(refused))
            job.peer.ready = True
            job.peer.queue.append(job)
            return False
        if not job.targets:
            job.peer.ready = True  # another rank writes all that this one holds
        # Readiness is judged on the first DP rank alone.
        job.open = all(key in job.peer.agents for key in self._keys(job, 0)) or not job.targets
        if not job.open:
            self._dial(job)
        return job.open

    def _find_targets(self, job: Job) -> PeerRefusal | None:
        """Map this rank onto the peer; a refusal is returned, or raised where the release raises it in the forward."""
        if job.targets or job.leg is None:
            return None
        size = self._known_size(as_int(job.leg.peer_tp), self.me.tp)  # not a number: raises in the forward of any release
        try:
            job.targets = self._map(self.rank.tp, self.me.tp, size, self.world.geometry)
        except PeerRefusal as refusal:
            if self.me.release.write_map_error != "task_fails":
                raise refusal.due_to("write_map_error") from None
            return refusal
        return None

    # -- handshake --------------------------------------------------------------------------------------------

    def _keys(self, job: Job, dp: int) -> list[AgentKey]:
        if len(job.targets) > 1:
            return [(dp, target.tp_rank) for target in job.targets]
        return [(dp, None)]

    def _dial(self, job: Job) -> None:
        """Queue handshakes with every DP rank of the peer on the one handshake thread; a dead port blocks it for ever."""
        clock, leg, peer = self.world.clock, job.leg, job.peer
        assert leg is not None
        handshake_ns = self.world.timing.handshake_ns
        at = max(clock.now, self.dial_free_at)
        reached: list[tuple[AgentKey, Any, Dial]] = []
        for key in (key for dp in range(as_int(leg.dp_size)) for key in self._keys(job, dp)):
            if at >= NEVER:
                break
            address = self._address(job, key)
            rank = self.world.network.owner(address)
            dial = Dial(address[1], key[0], self._dialled_tp(job, key))
            if rank is None:
                self.world.log("dial_dead", self.name, request=job.transfer.index, fields=dial)
                self.dial_free_at = at = NEVER
                self.world.network.when_bound(address, lambda: self._redial(job))
            else:
                self.dial_free_at = at = at + handshake_ns
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
                    self.world.log("dialled", self.name, rank.name, job.transfer.index, fields=dial)
            if position + 1 < len(reached):
                clock.after(handshake_ns, lambda _event: answered(position + 1))
            elif finished:
                peer.queue.append(job)
                peer.ready = True

        if reached:
            first = (self.dial_free_at if finished else clock.now + handshake_ns * len(reached)) - handshake_ns * (len(reached) - 1)
            clock.after(first - clock.now, lambda _event: answered(0))
        elif finished:
            answered(0)

    def _redial(self, job: Job) -> None:
        """The port for which the handshake thread waited was bound after all."""
        if self.rank.gone:
            return
        self.dial_free_at = self.world.clock.now
        self._dial(job)

    def _dialled_tp(self, job: Job, key: AgentKey) -> int:
        return key[1] if key[1] is not None else job.targets[0].tp_rank

    def _address(self, job: Job, key: AgentKey) -> tuple[str, int]:
        """The address that this release dials for `key`."""
        leg = job.leg
        assert leg is not None
        offset = self._dial_offset(fold(key[0], leg.pod_dp), self._dialled_tp(job, key), as_int(leg.peer_tp))
        return leg.pod_host(key[0]), leg.handshake_port + offset

    # -- write tasks ------------------------------------------------------------------------------------------

    def _schedule(self, job: Job, layer: int) -> None:
        if job.closed or layer in job.scheduled:
            return
        job.scheduled.add(layer)
        if job.blocks is not None:
            self._write(job, layer)
            return
        if not job.deferred:
            self.world.clock.after(self.world.setup.defer_timeout_ns, lambda _event: self._expire(job))
        job.deferred.append(layer)

    def blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: Tables, decode_dp: int) -> None:
        """Decode's scheduler told us where the blocks go. Ignored when the transfer is over here."""
        job = self._job_of(str(transfer_id), transfer)
        if job.closed:
            return
        if job.blocks is not None:
            if self.me.release.blocks_ready_again == "ignored":
                return
            self.world.log("blocks_ready_again", self.name, request=transfer.index)
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
        """One write task: a batch to every target. An error ends the transfer at this rank without a message."""
        clock = self.world.clock
        now = clock.now
        if now < self.thread_free_at or self._tasks:
            self._wait_for_thread(job, layer)
            return
        if job.wires is None:
            job.wires = [self._wires(job, group) for group in range(len(self.me.groups))]
            if job.transfer.posted_ns < 0:
                job.transfer.posted_ns = now
        for wire in job.wires[self.me.places[layer][0]]:
            if wire.refusal is not None or wire.rank is None:
                assert wire.refusal is not None
                self.world.log("task_failed", self.name, request=job.transfer.index, layer=layer, fields=Raised.by(wire.refusal))
                self._close_failed(job)
                return
            if wire.copy is None:
                self._fail(job, layer, Failed("length out of range", "bounds"))
            elif self._faulted or wire.rank.gone or wire.entries * self._layers > self._sq_depth:
                self._post_carefully(job, wire, layer)
            else:
                land = self._nic.occupy(wire.rank.nic, now, wire.busy_ns) + wire.tail_ns
                if land > job.last_land:
                    job.last_land = land
                job.in_flight += 1
                clock.after(land - now, partial(self._landed, job, wire.rank, wire.copy, layer))
        job.writes_done += 1
        if job.sealed is not None:
            self._finalize(job)

    def _wait_for_thread(self, job: Job, layer: int) -> None:
        """The write thread waits for another transfer to end; this task waits behind it."""
        if not self._tasks:
            clock = self.world.clock
            clock.after(self.thread_free_at - clock.now, lambda _event: self._next_tasks())
        self._tasks.append((job, layer))

    def _next_tasks(self) -> None:
        tasks, self._tasks = self._tasks, deque()
        for job, layer in tasks:
            if not job.closed:
                self._write(job, layer)

    def _post_carefully(self, job: Job, wire: Wire, layer: int) -> None:
        """Post one batch where the send queue may be full, or a planned fault may act."""
        clock, copy, rank = self.world.clock, wire.copy, wire.rank
        assert copy is not None and rank is not None
        now = clock.now
        rdma = self.world.setup.scenario.rdma
        room_at = self._nic.queue(now, wire.entries, self._sq_depth)
        if wire.entries > self._sq_depth:
            self._fail(job, layer, Failed("SQ request exceeds capacity", "queue"))
            return
        if room_at - now > rdma.sq_wait_s * 1e9:
            self._fail(job, layer, Failed("SQ full", "queue"))
            return
        land = self._nic.occupy(rank.nic, room_at, wire.busy_ns) + wire.tail_ns
        self._nic.queued(land, wire.entries)
        if rank.gone:
            effect = self.world.broken_session()
        else:
            effect = self.world.transfer_effect("write", self.name, rank.name, job.transfer.index, layer, land)
        if effect.refused:
            self._fail(job, layer, Failed(effect.refused, "planned"))
            return
        job.in_flight += 1
        job.last_land = max(job.last_land, effect.done_at)
        if effect.land_at is not None:
            part = copy.part(effect.fraction)
            clock.after(effect.land_at - now, lambda _event: self._land(job, rank, part, layer))
        failed = Failed(effect.error, "gone" if rank.gone else "planned") if effect.error else None
        if effect.done_at < NEVER:
            clock.after(effect.done_at - now, partial(self._completed, job, layer, failed))

    def _completed(self, job: Job, layer: int, failed: Failed | None, _event: Any) -> None:
        """MoRI says that a batch is over, well or not."""
        job.in_flight -= 1
        if failed is not None:
            self._fail(job, layer, failed)
        if job.sealed is not None:
            self._finalize(job)

    def end(self) -> None:
        """The process died: no transfer goes on."""
        for job in self.jobs.values():
            job.closed = True

    def _fail(self, job: Job, layer: int, failed: Failed) -> None:
        job.error = failed.error
        if self.rank.gone:
            return
        self.world.log("transfer_failed", self.name, request=job.transfer.index, layer=layer, fields=failed)

    def _land(self, job: Job, rank: DecodeRank, copy: Copy, layer: int) -> None:
        """The NIC read prefill's blocks and wrote decode's: what lands is what prefill's blocks hold at that moment."""
        if self.rank.gone or rank.gone:
            return
        if job.transfer.source_reused:
            copy = self._read_again(job, rank, copy, layer)
        rank.land(layer, copy, job.transfer, self.name, "wrote")

    def _landed(self, job: Job, rank: DecodeRank, copy: Copy, layer: int, _event: Any) -> None:
        self._land(job, rank, copy, layer)
        job.in_flight -= 1
        if rank.gone:
            self._fail(job, layer, Failed(BROKEN, "gone"))
        if job.sealed is not None:
            self._finalize(job)

    def _read_again(self, job: Job, rank: DecodeRank, copy: Copy, layer: int) -> Copy:
        """Prefill gave the blocks to another request before the NIC read them: what lands is what is there now."""
        wires = self._wires(job, self.me.places[layer][0])
        now = next((wire.copy for wire in wires if wire.rank is rank and wire.copy is not None), copy)
        return now.part(len(copy.where) / len(now.where))

    # -- offsets ----------------------------------------------------------------------------------------------

    def _wires(self, job: Job, group: int) -> list[Wire]:
        """Where every layer of a group goes: the same ranks and offsets, as layers have memory of their own."""
        wires = []
        if not job.targets and self._find_targets(job) is not None:
            return [Wire(None, None, 0, 0, refusal=PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}"))]
        state = self.me.groups[group].geometry.state
        for key, target in zip(self._keys(job, job.decode_dp), job.targets, strict=False):
            if not target.count and not state:
                continue  # another rank writes the same heads
            rank = job.peer.agents.get(key)
            try:
                if rank is None:
                    raise PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}")
                copy, entries = self._plan(job, target, rank, group)
            except PeerRefusal as refusal:
                wires.append(Wire(rank, None, 0, 0, refusal=refusal))
                break
            fabric = self.world.fabric
            busy_ns = fabric.occupancy_ns(copy.size_bytes, "write") if copy else 0
            wires.append(Wire(rank, copy, busy_ns, fabric.tail_ns(busy_ns, "write"), entries))
        return wires

    def _plan(self, job: Job, target: Target, rank: DecodeRank, group: int) -> Batch:
        """The batch of a layer of a group to one decode rank and its work requests; no batch when MoRI refuses it."""
        assert job.blocks is not None and job.transfer.prefill_tables is not None and job.leg is not None
        mine, theirs = self.me.groups[group], rank.me.groups[group]
        geometry = mine.geometry
        blocks = job.transfer.prefill_tables[mine.table].tolist()
        if self.me.release.write_clamp == "prompt_blocks":
            blocks = blocks[: job.transfer.request.prefill_size]
        part: Slice | None = None
        if geometry.state:
            size = self.me.release.call("unknown_tp_states_write")(as_int(job.leg.peer_tp), self.me.tp)
            if size <= 0:
                text = f"recurrent states of TP size {self.me.tp} to TP size {job.leg.peer_tp}"
                raise PeerRefusal("NotImplementedError", text, "unknown_tp_states_write")
            part = state_slice(self.rank.tp, self.me.tp, target.tp_rank, size, mine.shape.heads, theirs.shape.heads)
        elif self.me.release.write_plan == "head_slices" and self._by_heads(job, target, rank, group):
            part = Slice(target.local, target.remote, target.count)
            equal = self._known_size(as_int(job.leg.peer_tp), self.me.tp) == self.me.tp
            if self.world.geometry.mixed and equal and self.me.release.slice_heads == "of_layer":
                part = Slice(0, 0, mine.shape.heads)
        pairs = self._pair(blocks, job.blocks[mine.table])
        local, remote = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        source = SourceCache(mine.shape, self.rank.engine.contents, geometry.heads_of(self.rank.tp, self.me.tp).start)
        if part is not None:
            return head_slices(geometry, source, theirs.shape, local, remote, part)
        return whole_blocks(geometry, source, theirs.shape, local, remote, by_reader=False)

    def _by_heads(self, job: Job, target: Target, rank: DecodeRank, group: int) -> bool:
        """Whether heads are moved one by one, not whole blocks (0.33.0). Raises PeerRefusal where they can't be.

        The target counts the heads that the model as a whole has, whatever the layers of this group have.
        """
        assert job.leg is not None
        mine, theirs = self.me.groups[group].shape, rank.me.groups[group].shape
        advertised = rank.me.advertised(rank.me.groups[group]) if mine.planes > 1 else None
        advertises = rank.me.release.advertised == "layouts"
        if advertises and mine.block_size != theirs.block_size:
            raise PeerRefusal("MoRIIOError", f"{mine.block_size} tokens a block here, {theirs.block_size} at the peer")
        assumed = self.world.geometry.heads_per_rank(self._known_size(as_int(job.leg.peer_tp), self.me.tp))
        whole = target.count == self.me.shape.heads == assumed
        if whole and (advertised is None or mine.advertised == advertised.advertised):
            return False
        if advertised is None:
            why = "the peer advertises none" if mine.planes > 1 else "a latent has none"
            raise PeerRefusal("MoRIIOError", f"a write by heads needs a layout of heads, and {why}")
        check_slices(mine, advertised)
        if target.local + target.count > mine.heads or target.remote + target.count > advertised.heads:
            heads = f"heads {target.local}+{target.count} of {mine.heads} to {target.remote}+{target.count} of {advertised.heads}"
            raise PeerRefusal("ValueError", f"{heads} a rank")
        return True

    # -- the end of a transfer --------------------------------------------------------------------------------

    def _finalize(self, job: Job) -> None:
        """When every sealed write is posted: wait for them, tell decode, report. Errors and time-outs tell nobody."""
        if job.closed or job.sealed is None or job.writes_done < job.sealed:
            return
        clock, timeout_ns = self.world.clock, self.world.setup.transfer_timeout_ns
        patient = self.me.release.write_wait == "all_statuses" or not job.error
        if job.in_flight and patient:
            if not job.waiting:
                job.waiting = True
                until = min(job.last_land, clock.now + timeout_ns)
                self.thread_free_at = max(self.thread_free_at, until)
                if job.last_land > until:
                    clock.after(timeout_ns, lambda _event: self._give_up(job))
            return
        if job.error and job.in_forward:
            return
        if job.error:
            self._close_failed(job)
        else:
            self._tell_done(job)
            self._close(job)

    def _give_up(self, job: Job) -> None:
        if not job.closed:
            self._fail(job, -1, Failed("transfer timeout", "timeout"))
            self._close_failed(job)

    def _close_failed(self, job: Job) -> None:
        """The transfer went wrong at this rank; whether decode hears of it is up to the release."""
        self._close(job)
        if self.me.release.write_failure == "write_failed":
            for target in job.targets:
                self._notify(job, job.decode_dp, target.tp_rank, "write_failed", partial(self._say_failed, job))

    def _close(self, job: Job) -> None:
        """Nothing more happens for this transfer here; the rank reports it finished."""
        job.closed = True
        # A rank whose id the scheduler doesn't map is never matched to a request, nor, in most releases, is no id at all.
        known = job.id in self.rank.engine.known
        if job.leg is None or (known and (job.leg.transfer_id is not None or self.me.release.null_id == "matched")):
            self.rank.engine.report(job.transfer, self.name)

    def _expire(self, job: Job) -> None:
        """Decode's blocks never came within the defer timeout."""
        if job.closed or job.blocks is not None:
            return
        job.transfer.timer_fired = True
        self.world.log("expired", self.name, request=job.transfer.index)
        self._close(job)
        if self.me.release.expiry == "write_failed":
            assert job.leg is not None
            for dp in range(min(max(as_int(job.leg.dp_size), 1), MOST_RANKS)):
                for target in job.targets:
                    self._notify(job, dp, target.tp_rank, "write_failed", partial(self._say_failed, job))

    def _tell_done(self, job: Job) -> None:
        writers = {target.tp_rank: target.writers for target in job.targets}
        for tp in self._done_to(self.rank.tp, job.targets):
            self._notify(job, job.decode_dp, tp, "write_done", partial(self._say_done, job, writers.get(tp, 1)))

    def _notify(self, job: Job, dp: int, tp: int, what: str, deliver: Any) -> None:
        leg = job.leg
        assert leg is not None
        route = self._last_leg if self.me.release.pod_routing == "worker" and self._last_leg is not None else leg
        offset = self._port_offset(fold(dp, route.pod_dp), tp, non_positive_is_own(as_int(leg.peer_tp), self.me.tp))
        port = leg.notify_port + offset
        self.world.log(f"{what}_sent", self.name, request=job.transfer.index, fields=Sent(port))
        self.world.network.send(self.name, (route.pod_host(dp), port), job.transfer.index, what, deliver)

    def _say_done(self, job: Job, writers: int, rank: Rank) -> None:
        assert job.leg is not None
        rank.on_write_done(job.leg.transfer_id, job.transfer, writers, self.name)

    def _say_failed(self, job: Job, rank: Rank) -> None:
        assert job.leg is not None
        rank.on_write_failed(job.leg.transfer_id, job.transfer, self.name)
