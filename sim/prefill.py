"""The prefill engine: a scheduler for each DP rank, and its TP ranks, which write layer by layer in WRITE mode.

What a rank does follows the connector's worker: handshakes on one thread, a write task a layer, deferral until decode's
blocks are known, a sealed count, then one message to each decode rank that release would tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import PeerRefusal
from sim.ledger import Bytes, Codes, Copy, cell_copy, raw_copy
from sim.legs import Leg, read_leg, transfer_id_of
from sim.policies import Target, as_int
from sim.rank import Rank
from sim.transfer import BlockPool, Transfer, response_of

if TYPE_CHECKING:
    from sim.decode import DecodeRank
    from sim.world import World

NEVER = 1 << 62
AgentKey = tuple[int, int | None]


class Peer:
    """What one prefill rank knows of one decode engine: sessions by (DP rank, TP rank when it writes to several)."""

    def __init__(self) -> None:
        self.agents: dict[AgentKey, Any] = {}
        self.ready = False
        self.ready_at = NEVER
        self.queue: deque[Job] = deque()


class Job:
    """One transfer at one prefill rank."""

    def __init__(self, transfer: Transfer, transfer_id: str, leg: Leg | None) -> None:
        self.transfer = transfer
        self.id = transfer_id
        self.leg = leg
        self.targets: list[Target] = []
        self.scheduled: set[int] = set()
        self.deferred: list[int] = []
        self.sealed: int | None = None
        # decode's blocks and what was written of them; a second message starts this over (F7)
        self.blocks: list[int] | None = None
        self.decode_dp = 0
        self.writes_done = 0
        self.copies: dict[int, Copy | None] = {}
        self.in_flight = 0
        self.last_land = 0
        self.error = ""
        self.finalizing = False


class PrefillRank(Rank):
    """TP rank `tp` of one DP rank of prefill."""

    def __init__(self, engine: PrefillEngine, tp: int) -> None:
        super().__init__(engine.world, engine.me.rank_name(engine.dp, tp))
        self.engine = engine
        self.me = engine.me
        self.tp = tp
        self.first_head = self.world.geometry.heads_of(tp, self.me.tp).start
        self.peers: dict[tuple[str, int], Peer] = {}
        self.jobs: dict[str, Job] = {}
        self.terminal: set[str] = set()
        self.acks: dict[str, int] = {}
        self.dial_free_at = 0
        self.nic_free_at = 0
        release = self.me.release
        self._map, self._pair = release.call("write_map"), release.call("write_pairing")
        self._dial_offset, self._port_offset = release.call("dial"), release.call("ports")
        self._known_size, self._done_to = release.call("unknown_tp_map"), release.call("write_done_to")

    # -- forward ----------------------------------------------------------------------------------------------

    def forward(self, jobs: list[tuple[Transfer, Leg | None]]) -> Generator[Any, None, None]:
        """Compute all layers for a batch; write each as it is ready, and once more all that handshakes held up."""
        clock, layers = self.world.clock, self.world.geometry.layers
        layer_ns = self.world.timing.prefill_layer_ns
        saving = [self._job(transfer, leg) for transfer, leg in jobs if leg is not None and self.world.mode == "write"]
        for layer in range(layers):
            yield clock.timeout(layer_ns)
            if saving and (wait := self._save(saving, layer)):
                yield clock.timeout(wait)
                self._after_wait(saving, layer, wait)
        for layer in range(layers):
            if self._held_up(saving, layer) and (wait := self._save(saving, layer)):
                yield clock.timeout(wait)
                self._after_wait(saving, layer, wait)
        for job in saving:
            if job.scheduled:
                job.sealed = len(job.scheduled)
                self._finalize(job)

    def _job(self, transfer: Transfer, leg: Leg) -> Job:
        key = str(leg.transfer_id)
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = Job(transfer, key, leg)
        job.transfer, job.leg = transfer, leg
        return job

    def _peer(self, leg: Leg) -> Peer:
        return self.peers.setdefault((leg.host, leg.handshake_port), Peer())

    def _save(self, jobs: list[Job], layer: int) -> int:
        """What `save_kv_layer` does for a batch; returns how many ns the forward waits for a handshake (0: none)."""
        peer: Peer | None = None
        for job in jobs:
            assert job.leg is not None
            peer = self._peer(job.leg)
            refused = self._find_targets(job)
            if refused is None and not job.targets:
                peer.ready = True
            elif refused is not None or not self._known(peer, job):
                self._dial(peer, job, refused)
                continue
            self._schedule(job, layer)
        if peer is None:
            return 0
        if peer.ready:
            if peer.queue:
                self._schedule(peer.queue.popleft(), layer)
            return 0
        return min(peer.ready_at + 1 - self.world.clock.now, self.world.setup.transfer_timeout_ns)

    def _held_up(self, jobs: list[Job], layer: int) -> bool:
        """Whether a second call for this layer still has something to do, or to wait for."""
        return any(
            layer not in job.scheduled or (job.leg is not None and not self._peer(job.leg).ready)
            for job in jobs
            if job.id not in self.terminal
        )

    def _after_wait(self, jobs: list[Job], layer: int, waited: int) -> None:
        leg = jobs[-1].leg
        assert leg is not None
        peer = self._peer(leg)
        if peer.ready and peer.queue:
            self._schedule(peer.queue.popleft(), layer)
        elif not peer.ready:
            self.world.log("stalled", self.name, request=jobs[-1].transfer.index, layer=layer, detail=f"{waited} ns")

    def _find_targets(self, job: Job) -> PeerRefusal | None:
        """Map this rank onto the peer; a refusal is returned, or raised where the release raises it in the forward."""
        if job.targets or job.leg is None:
            return None
        try:
            size = self._known_size(as_int(job.leg.peer_tp), self.me.tp)
            job.targets = self._map(self.tp, self.me.tp, size, self.world.geometry)
        except PeerRefusal as refusal:
            if self.me.release.write_map_error != "task_fails":
                raise
            return refusal
        return None

    # -- handshake --------------------------------------------------------------------------------------------

    def _keys(self, job: Job, dp: int) -> list[AgentKey]:
        if len(job.targets) > 1:
            return [(dp, target.tp_rank) for target in job.targets]
        return [(dp, None)]

    def _known(self, peer: Peer, job: Job) -> bool:
        """Readiness is judged on the first DP rank alone."""
        return all(key in peer.agents for key in self._keys(job, 0))

    def _dial(self, peer: Peer, job: Job, refused: PeerRefusal | None) -> None:
        """Queue handshakes with every DP rank of the peer on the one handshake thread."""
        clock, leg = self.world.clock, job.leg
        assert leg is not None
        if refused is not None:
            self.world.log("map_refused", self.name, request=job.transfer.index, detail=str(refused))
            peer.ready = True
            peer.queue.append(job)
            return
        at = max(clock.now, self.dial_free_at)
        reached: list[tuple[AgentKey, Any, str]] = []
        for key in [key for dp in range(as_int(leg.dp_size)) for key in self._keys(job, dp)]:
            rank, port = self._dial_one(job, key)
            if at >= NEVER or rank is None:
                self.dial_free_at = at = NEVER
                break
            at += self.world.timing.handshake_ns
            self.dial_free_at = at
            reached.append((key, rank, port))
        peer.ready_at = min(peer.ready_at, at)

        def answered(position: int) -> None:
            """One handshake is done; after the last one the request is ready, in the same instant."""
            if position < len(reached):
                key, rank, port = reached[position]
                if key not in peer.agents:
                    peer.agents[key] = rank
                    self.world.log("dialled", self.name, rank.name, job.transfer.index, detail=port)
            if position + 1 < len(reached):
                clock.after(self.world.timing.handshake_ns, lambda _event: answered(position + 1))
            elif at < NEVER:
                peer.queue.append(job)
                peer.ready = True

        if reached:
            first = at - self.world.timing.handshake_ns * (len(reached) - 1) if at < NEVER else clock.now
            clock.after(first - clock.now, lambda _event: answered(0))
        elif at < NEVER:
            answered(0)

    def _dial_one(self, job: Job, key: AgentKey) -> tuple[Any | None, str]:
        """Who listens at the port that this release dials for `key`, and how the history names it."""
        leg = job.leg
        assert leg is not None
        dp, tp = key[0], key[1] if key[1] is not None else job.targets[0].tp_rank
        port = leg.handshake_port + self._dial_offset(dp, tp, as_int(leg.peer_tp))
        rank = self.world.network.owner((leg.host, port))
        if rank is None:
            self.world.log("dial_dead", self.name, f"port {port}", job.transfer.index, detail=f"for dp{dp} tp{tp}")
        return rank, f"port {port} for dp{dp} tp{tp}"

    # -- writing ----------------------------------------------------------------------------------------------

    def _schedule(self, job: Job, layer: int) -> None:
        if job.id in self.terminal or layer in job.scheduled:
            return
        job.scheduled.add(layer)
        if job.blocks is not None:
            self._write(job, layer)
            return
        if not job.deferred:
            self.world.clock.after(self.world.setup.defer_timeout_ns, lambda _event: self._expire(job))
        job.deferred.append(layer)

    def on_blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: list[int], decode_dp: int) -> None:
        """Decode's scheduler told us where the blocks go."""
        self.world.log("blocks_ready", self.name, request=transfer.index)
        key = str(transfer_id)
        if key in self.terminal:
            return
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = Job(transfer, key, None)
        job.blocks, job.decode_dp, job.writes_done, job.copies = blocks, decode_dp, 0, {}
        deferred, job.deferred = job.deferred, []
        for layer in deferred:
            if job.id not in self.terminal:
                self._write(job, layer)

    def _write(self, job: Job, layer: int) -> None:
        """One write task: a batch to every target. An error ends the transfer at this rank without a message."""
        try:
            self._write_to_targets(job, layer)
        except PeerRefusal as refusal:
            self.world.log("task_failed", self.name, request=job.transfer.index, layer=layer, detail=str(refusal))
            self._done(job)

    def _write_to_targets(self, job: Job, layer: int) -> None:
        assert job.leg is not None
        peer = self._peer(job.leg)
        if not job.targets and self._find_targets(job) is not None:
            raise PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}: its handshake failed")
        for key, target in zip(self._keys(job, job.decode_dp), job.targets, strict=False):
            rank = peer.agents.get(key)
            if rank is None:
                raise PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}")
            if target.tp_rank not in job.copies:
                job.copies[target.tp_rank] = self._plan(job, target, rank)
            copy = job.copies[target.tp_rank]
            if copy is None:
                job.error = "length out of range"
                self.world.log("transfer_failed", self.name, rank.name, job.transfer.index, layer, job.error)
            else:
                self._post(job, rank, layer, copy)
        job.writes_done += 1
        self._finalize(job)

    def _plan(self, job: Job, target: Target, rank: DecodeRank) -> Copy | None:
        """The batch of every layer of one transfer to one decode rank; None when MoRI refuses it."""
        assert job.blocks is not None and job.transfer.prefill_blocks is not None
        geometry, mine, theirs = self.world.geometry, self.me.shape, rank.me.shape
        pairs = self._pair(job.transfer.prefill_blocks.tolist(), job.blocks)
        if self.me.release.write_plan == "local_strides" and mine.heads != theirs.heads:
            here = Bytes(mine, self.engine.contents, self.first_head)
            return raw_copy(geometry, here, Bytes(theirs, self.engine.contents, 0), pairs, into_remote=True)
        if target.remote + target.count > theirs.heads and not geometry.mla:
            raise PeerRefusal("MoRIIOError", f"heads {target.remote}+{target.count} at a rank of {theirs.heads} heads")
        local, remote = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        return cell_copy(
            geometry,
            theirs,
            self.engine.contents[local],
            remote,
            self.first_head + target.local,
            target.remote,
            target.count,
        )

    def _post(self, job: Job, rank: DecodeRank, layer: int, copy: Copy) -> None:
        clock, fabric = self.world.clock, self.world.fabric
        busy_until = max(clock.now, self.nic_free_at) + fabric.occupancy_ns(copy.size_bytes, "write")
        self.nic_free_at = busy_until
        land = busy_until + fabric.fixed_ns("write")
        job.in_flight += 1
        job.last_land = max(job.last_land, land)

        def landed(_event: Any) -> None:
            rank.land(layer, copy, job.transfer, self.name, "wrote")
            job.in_flight -= 1
            self._finalize(job)

        clock.after(land - clock.now, landed)

    # -- the end of a transfer --------------------------------------------------------------------------------

    def _finalize(self, job: Job) -> None:
        """When every sealed write is posted: wait for them, tell decode, report. Errors and time-outs tell nobody."""
        if job.sealed is None or job.writes_done < job.sealed or job.id in self.terminal:
            return
        clock, timeout_ns = self.world.clock, self.world.setup.transfer_timeout_ns
        if job.in_flight and not job.error:
            if not job.finalizing and job.last_land - clock.now > timeout_ns:
                clock.after(timeout_ns, lambda _event: self._give_up(job))
            job.finalizing = True
            return
        if not job.error:
            self._tell(job)
        self._done(job)

    def _give_up(self, job: Job) -> None:
        if job.id not in self.terminal:
            job.error = "transfer timeout"
            self.world.log("transfer_failed", self.name, request=job.transfer.index, detail=job.error)
            self._done(job)

    def _tell(self, job: Job) -> None:
        leg, network = job.leg, self.world.network
        assert leg is not None
        writers = {target.tp_rank: target.writers for target in job.targets}
        for tp in self._done_to(self.tp, job.targets):
            port = leg.notify_port + self._port_offset(job.decode_dp, tp, self._known_size(as_int(leg.peer_tp), self.me.tp))
            self.world.log("write_done_sent", self.name, f"port {port}", job.transfer.index)
            count = writers.get(tp, 1)
            network.send(
                self.name, (leg.host, port), job.transfer.index, "write_done",
                partial(self._say_done, job, count),
            )  # fmt: skip

    def _say_done(self, job: Job, writers: int, rank: Rank) -> None:
        assert job.leg is not None
        rank.on_write_done(job.leg.transfer_id, job.transfer, writers, self.name)

    def _done(self, job: Job) -> None:
        """Nothing more happens for this transfer here; the rank reports it finished."""
        self.terminal.add(job.id)
        self.engine.report(job.transfer, self.name)

    def _expire(self, job: Job) -> None:
        """Decode's blocks never came within the defer timeout."""
        if job.id in self.terminal or job.blocks is not None:
            return
        job.transfer.timer_fired = True
        self.world.log("expired", self.name, request=job.transfer.index)
        self._done(job)
        if self.me.release.expiry == "write_failed":
            self._tell_failed(job)

    def _tell_failed(self, job: Job) -> None:
        leg = job.leg
        assert leg is not None
        for dp in range(max(as_int(leg.dp_size), 1)):
            for target in job.targets:
                size = self._known_size(as_int(leg.peer_tp), self.me.tp)
                port = leg.notify_port + self._port_offset(dp, target.tp_rank, size)
                self.world.log("write_failed_sent", self.name, f"port {port}", job.transfer.index)
                self.world.network.send(
                    self.name, (leg.host, port), job.transfer.index, "write_failed",
                    lambda rank: rank.on_write_failed(leg.transfer_id, job.transfer, self.name),
                )  # fmt: skip

    def on_release(self, transfer_id: Any, transfer: Transfer, consumer_tp: int, sender: str) -> None:
        """A decode rank no longer needs our blocks (READ); counted until the release's rule is met."""
        self.world.log("release", self.name, sender, transfer.index)
        key = str(transfer_id)
        if key in self.terminal:
            return
        self.acks[key] = self.acks.get(key, 0) + 1
        if self.acks[key] >= self.me.release.call("acks")(self.me.tp, consumer_tp):
            self.terminal.add(key)
            self.engine.report(transfer, self.name)


class PrefillEngine:
    """Scheduler and executor of one prefill DP rank."""

    def __init__(self, world: World, dp: int) -> None:
        self.world = world
        self.me = world.setup.prefill
        self.dp = dp
        self.name = self.me.letter + (str(dp) if self.me.dp > 1 else "")
        fixed = {b for r in world.setup.requests if r.prefill_dp == dp for b in r.prefill_blocks or ()}
        self.pool = BlockPool(self.me.shape.num_blocks, fixed)
        self.contents: Codes = np.zeros(self.me.shape.num_blocks, dtype=np.int64)
        self.crashed = ""
        self.started = True
        self.ranks = [PrefillRank(self, tp) for tp in range(self.me.tp)]
        self._waiting: list[tuple[Transfer, dict[str, Any], Leg | None, Any]] = []
        self._running = False
        self._reports: dict[int, int] = {}
        self._finished: set[int] = set()

    def submit(self, transfer: Transfer, params: dict[str, Any], answer: Any) -> None:
        """A leg arrived; `answer` is the event that the router waits for."""
        if not self.started:
            return
        if self.crashed:
            answer.succeed(None)
            return
        try:
            if self.me.release.write_map_error == "request_refused" and (why := self.world.refuses()):
                raise PeerRefusal("Refused", why)
            leg = self._read(transfer, params)
        except PeerRefusal as refusal:
            self._refuse_or_crash(transfer, refusal)
            answer.succeed(None)
            return
        blocks = self.pool.take(transfer.index, transfer.request.blocks, transfer.request.prefill_blocks)
        transfer.prefill_blocks = blocks
        self.contents[blocks] = transfer.contents
        self._waiting.append((transfer, params, leg, answer))
        if not self._running:
            self._running = True
            self.world.clock.process(self._steps())

    def _refuse_or_crash(self, transfer: Transfer, refusal: PeerRefusal) -> None:
        if self.me.release.write_map_error == "request_refused":
            self.world.refuse(transfer, self.name, refusal.text)
        else:
            self.crash(str(refusal), transfer)

    def _read(self, transfer: Transfer, params: dict[str, Any]) -> Leg | None:
        """The leg as a write job needs it; None for a request that is not to be decoded elsewhere."""
        if not params.get("do_remote_decode"):
            return None
        if self.world.mode == "read" and self.me.release.prefill_leg_read == "write_only":
            transfer_id_of(params, self.me.release.transfer_id_missing, f"P-{transfer.index}")
            return None
        return read_leg(params, self.me, self.world.setup.decode, f"P-{transfer.index}")

    def _steps(self) -> Any:
        """Run waiting requests in batches until there are none."""
        clock = self.world.clock
        while self._waiting and not self.crashed:
            batch, self._waiting = self._waiting, []
            forwards = [clock.process(self._guarded(rank, batch)) for rank in self.ranks]
            yield clock.all_of(forwards)
            for transfer, params, _leg, answer in batch:
                answer.succeed(self._conclude(transfer, params))
        for *_rest, answer in self._waiting:
            answer.succeed(None)
        self._running = False

    def _conclude(self, transfer: Transfer, params: dict[str, Any]) -> dict[str, Any] | None:
        """The forward is done; what the router is answered, None when the engine died in it."""
        if self.crashed:
            return None
        self._finish(transfer, params)
        return response_of(params, self.me, self.dp, transfer) if params.get("do_remote_decode") else None

    def _guarded(self, rank: PrefillRank, batch: list[Any]) -> Any:
        try:
            yield from rank.forward([(transfer, leg) for transfer, _params, leg, _answer in batch])
        except PeerRefusal as refusal:
            self.crash(str(refusal), batch[0][0], rank.name)

    def _finish(self, transfer: Transfer, params: dict[str, Any]) -> None:
        """The forward is done: keep the blocks for decode, with or without a timer, or free them."""
        self._finished.add(transfer.index)
        if not params.get("do_remote_decode"):
            self._free(transfer, "freed")
            return
        if self.me.release.reaper == "both_modes" or self.world.mode == "read":
            self.world.clock.after(self.world.setup.defer_timeout_ns, lambda _event: self._free(transfer, "reaped"))
        self._free_if_reported(transfer)

    def report(self, transfer: Transfer, rank: str) -> None:
        """A rank reported the transfer finished; the executor counts reports and does not ask from whom."""
        self.world.log("released", rank, request=transfer.index)
        self._reports[transfer.index] = self._reports.get(transfer.index, 0) + 1
        self._free_if_reported(transfer)

    def _free_if_reported(self, transfer: Transfer) -> None:
        if transfer.index in self._finished and self._reports.get(transfer.index, 0) >= self.me.tp:
            self._free(transfer, "freed")

    def _free(self, transfer: Transfer, kind: str) -> None:
        if self.pool.give_back(transfer.index):
            transfer.timer_fired |= kind == "reaped"
            self.world.log(kind, self.name, request=transfer.index)

    def crash(self, error: str, transfer: Transfer, where: str = "") -> None:
        """The engine is lost, and with it every request in it."""
        if not self.crashed:
            self.crashed = error
            self.world.log("crashed", where or self.name, request=transfer.index, detail=error)
