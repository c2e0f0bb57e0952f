"""The decode engine: a scheduler for each DP rank, and its TP ranks, which are written to, or read themselves in READ.

In WRITE the scheduler tells prefill its blocks and waits until as many ranks as it has reported; nothing ends that wait.
In READ the request runs in the step in which its reads are posted; what holds the forward back is the release's barrier.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import PeerRefusal
from sim.ledger import Bytes, Copy, Ledger, cell_copy, raw_copy
from sim.legs import Leg, peer_address, read_leg, transfer_id_of
from sim.policies import Target, as_int
from sim.rank import Rank
from sim.transfer import BlockPool, Transfer

if TYPE_CHECKING:
    from sim.prefill import PrefillRank
    from sim.world import World


class Read(list[tuple[Target, "PrefillRank", Copy | None]]):
    """What one decode rank reads for one request: from whom, and the batch of every layer (None: refused by MoRI)."""


class DecodeRank(Rank):
    """TP rank `tp` of one DP rank of decode; its memory is row `tp` of the engine's ledger."""

    def __init__(self, engine: DecodeEngine, tp: int) -> None:
        super().__init__(engine.world, engine.me.rank_name(engine.dp, tp))
        self.engine = engine
        self.me = engine.me
        self.tp = tp
        self.messages: dict[str, int] = {}
        self.nic_free_at = 0
        self.agents: dict[tuple[int, int | None], Any] = {}
        self.reads_started = engine.dp  # the round of flexible reads starts at the DP rank

    def land(self, layer: int, copy: Copy, transfer: Transfer, source: str, kind: str) -> None:
        """A batch landed here. What it changes outside this request's own cells is astray."""
        engine, world = self.engine, self.world
        mine = transfer.home is engine
        if mine and not copy.by_unit:
            engine.ledger.land(self.tp, layer, transfer.index, copy)
        else:
            world.stray += engine.ledger.land_astray(self.tp, layer, copy, transfer.index if mine else None)
        world.history.rows.append((world.clock.now, kind, source, self.name, transfer.index, layer, "" if mine else "astray"))

    # -- WRITE ------------------------------------------------------------------------------------------------

    def on_write_done(self, transfer_id: Any, transfer: Transfer, writers: int, sender: str) -> None:
        """A prefill rank says that it wrote; complete at once, or when all writers said so."""
        key = str(transfer_id)
        count = self.messages.get(key, 0) + 1
        if self.me.release.completion == "all_writers" and count < writers:
            self.messages[key] = count
            return
        self.messages.pop(key, None)
        self.world.log("told", self.name, sender, transfer.index)
        self.engine.report(key, failed=False)

    def on_write_failed(self, transfer_id: Any, transfer: Transfer, sender: str) -> None:
        key = str(transfer_id)
        self.messages.pop(key, None)
        self.world.log("told_failed", self.name, sender, transfer.index)
        self.engine.report(key, failed=True)

    # -- READ -------------------------------------------------------------------------------------------------

    def dial(self, leg: Leg, keys: list[tuple[int, int | None]]) -> bool:
        """Handshake with these (DP, TP) ranks of prefill, one after another; False if one never answers."""
        release = self.me.release
        for dp, tp in keys:
            if (dp, tp) in self.agents:
                continue
            dialled = tp if tp is not None else self._source_tp(leg)
            port = leg.handshake_port + release.call("dial")(dp, dialled, as_int(leg.peer_tp))
            rank = self.world.network.owner((leg.host, port))
            if rank is None:
                self.world.log("dial_dead", self.name, f"port {port}", detail=f"for P dp{dp} tp{dialled}")
                return False
            self.agents[dp, tp] = rank
            self.world.log("dialled", self.name, rank.name, detail=f"port {port} for dp{dp} tp{dialled}")
        return True

    def _source_tp(self, leg: Leg) -> int:
        return self._targets(leg)[0].tp_rank

    def _targets(self, leg: Leg) -> list[Target]:
        release = self.me.release
        size = release.call("unknown_tp_map")(leg.peer_tp, self.me.tp)
        targets: list[Target] = release.call("read_map")(self.tp, self.me.tp, size, self.world.geometry)
        return targets

    def keys(self, leg: Leg) -> list[tuple[int, int | None]]:
        """The (DP, TP) ranks of prefill that this rank handshakes with; TP None is the one that the map names."""
        dps = range(as_int(leg.dp_size))
        if self._flexible(leg):
            return [(0, tp) for tp in range(as_int(leg.peer_tp))]
        targets = self._targets(leg)
        if len(targets) > 1:
            return [(dp, target.tp_rank) for dp in dps for target in targets]
        return [(dp, None) for dp in dps]

    def _flexible(self, leg: Leg) -> bool:
        return (
            self.me.release.read_flex == "mla_tp1"
            and self.me.tp == 1
            and self.world.geometry.mla
            and as_int(leg.dp_size) == 1
            and as_int(leg.peer_tp) > 1
        )

    def plan_read(self, leg: Leg, transfer: Transfer) -> Read:
        """Sources and batches of one request. Raises PeerRefusal where `start_load_kv` raises."""
        release, geometry, me = self.me.release, self.world.geometry, self.me
        if self._flexible(leg):
            chosen = self.reads_started % as_int(leg.peer_tp)
            self.reads_started += 1
            targets = [Target(chosen, 0, 0, 1)]
        else:
            targets = self._targets(leg)
        dp = as_int(leg.dp_rank) if release.read_dp == "param" else 0
        read = Read()
        for target in targets:
            named = self._flexible(leg) or len(targets) > 1
            source = self.agents.get((dp, target.tp_rank if named else None))
            if source is None:
                raise PeerRefusal("KeyError", f"no session to prefill DP rank {dp}")
            guard_size = release.call("unknown_tp_guard")(leg.peer_tp, me.tp)
            release.call("read_guard")(me.tp, guard_size, me.shape, source.me.shape, geometry)
            read.append((target, source, self._plan_copy(target, source, transfer, leg)))
        return read

    def _plan_copy(self, target: Target, source: PrefillRank, transfer: Transfer, leg: Leg) -> Copy | None:
        assert transfer.decode_blocks is not None
        geometry, mine, theirs = self.world.geometry, self.me.shape, source.me.shape
        contents = source.engine.contents
        pairs = self.me.release.call("read_pairing")(transfer.decode_blocks.tolist(), list(leg.blocks))
        partial = target.count < mine.heads
        if mine.heads != theirs.heads and not partial and self.me.release.read_map != "gather":
            return raw_copy(
                geometry, Bytes(mine, contents, 0), Bytes(theirs, contents, source.first_head), pairs, into_remote=False
            )
        local, remote = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        first = source.first_head + target.remote
        return cell_copy(geometry, mine, contents[remote], local, first, target.local, target.count)

    def post(self, read: Read, transfer: Transfer) -> tuple[list[int], bool]:
        """Post all layers; returns when each has landed (ns, one a layer) and whether MoRI refused any."""
        clock, fabric, layers = self.world.clock, self.world.fabric, self.world.geometry.layers
        lands = [clock.now] * layers
        refused = any(copy is None for _target, _source, copy in read)
        for layer in range(layers):
            for _target, source, copy in read:
                if copy is None:
                    self.world.log("transfer_failed", self.name, source.name, transfer.index, layer, "length out of range")
                    continue
                busy_until = max(clock.now, self.nic_free_at) + fabric.occupancy_ns(copy.size_bytes, "read")
                self.nic_free_at = busy_until
                land = busy_until + fabric.fixed_ns("read")
                lands[layer] = max(lands[layer], land)
                self._land_later(layer, copy, transfer, source, land)
        return lands, refused

    def _land_later(self, layer: int, copy: Copy, transfer: Transfer, source: PrefillRank, land: int) -> None:
        clock = self.world.clock
        if land == clock.now:
            self.land(layer, copy, transfer, source.name, "read")
        else:
            clock.after(land - clock.now, lambda _event: self.land(layer, copy, transfer, source.name, "read"))

    def look(self, transfer: Transfer, layer: int) -> None:
        """Decode uses this layer now: note what is there."""
        transfer.used(self.tp, self.engine.ledger.count(self.tp, layer, transfer.index, transfer.needs[self.tp]))

    def look_at_all(self, transfer: Transfer) -> None:
        """Decode uses all layers from now on."""
        transfer.used(self.tp, self.engine.ledger.count_all(self.tp, transfer.index, transfer.needs[self.tp]))

    def send_release(self, leg: Leg, read: Read, transfer: Transfer) -> None:
        """Tell prefill's ranks, as this release knows them, that the blocks are read (or that the read failed)."""
        release = self.me.release
        size = release.call("unknown_tp_map")(leg.peer_tp, self.me.tp)
        sources = [target.tp_rank for target, _source, _copy in read]
        holders = release.call("release_to")(self.tp, sources, self.me.tp, size)
        if self._flexible(leg) and release.release_to == "holders":
            holders = range(as_int(leg.peer_tp))
        dp = as_int(leg.dp_rank) if release.read_dp == "param" else 0
        factor = {"tp": 0, "raw": as_int(leg.peer_tp), "effective": size}[release.release_port]
        consumer = 1 if release.release_to == "own_rank" else self.me.tp
        for tp in holders:
            port = leg.notify_port + dp * factor + tp
            self.world.log("release_sent", self.name, f"port {port}", transfer.index)
            self.world.network.send(
                self.name, (leg.host, port), transfer.index, "release",
                lambda rank: rank.on_release(leg.transfer_id, transfer, consumer, self.name),
            )  # fmt: skip


class DecodeEngine:
    """Scheduler and executor of one decode DP rank."""

    def __init__(self, world: World, dp: int) -> None:
        self.world = world
        self.me = world.setup.decode
        self.dp = dp
        self.name = self.me.letter + (str(dp) if self.me.dp > 1 else "")
        fixed = {b for r in world.setup.requests if r.decode_dp == dp for b in r.decode_blocks or ()}
        self.pool = BlockPool(self.me.shape.num_blocks, fixed)
        self.ledger = Ledger(world.geometry, self.me.shape, self.me.tp)
        self.crashed = ""
        self.started = True
        self.ranks = [DecodeRank(self, tp) for tp in range(self.me.tp)]
        self.waiting: dict[str, Transfer] = {}
        self._reports: dict[str, int] = {}
        self._failed: set[str] = set()

    def submit(self, transfer: Transfer, params: dict[str, Any]) -> None:
        """A leg arrived at the scheduler."""
        if not self.started:
            return
        if self.crashed:
            transfer.bad_end = "crash"
            return
        refuses = self.me.release.write_map_error == "request_refused"
        try:
            if refuses and (why := self.world.refuses()):
                raise PeerRefusal("Refused", why)
            if self.world.mode == "write":
                self._admit_write(transfer, params)
            else:
                self._admit_read(transfer, params)
        except PeerRefusal as refusal:
            if refuses:
                self.world.refuse(transfer, self.name, refusal.text)
            else:
                self.crash(str(refusal), transfer)

    def _allocate(self, transfer: Transfer) -> list[int]:
        blocks = self.pool.take(transfer.index, transfer.request.blocks, transfer.request.decode_blocks)
        transfer.admit(blocks, self)
        self.ledger.admit(transfer.index, blocks)
        ids: list[int] = blocks.tolist()
        return ids

    # -- WRITE ------------------------------------------------------------------------------------------------

    def _admit_write(self, transfer: Transfer, params: dict[str, Any]) -> None:
        release = self.me.release
        wanted = bool(params.get("do_remote_prefill"))
        if not wanted and release.match_write == "if_do_remote_prefill":
            self._recompute(transfer)
            return
        transfer_id = transfer_id_of(params, release.transfer_id_missing, f"D-{transfer.index}")
        blocks = self._allocate(transfer)
        self.waiting[str(transfer_id)] = transfer
        if wanted:
            self._tell_blocks(transfer, params, transfer_id, blocks)

    def _tell_blocks(self, transfer: Transfer, params: dict[str, Any], transfer_id: Any, blocks: list[int]) -> None:
        """Send our block ids to prefill's ranks, as many as this release counts."""
        release, peer = self.me.release, self.world.setup.prefill
        if not release.call("blocks_ready_gate")(params, self.dp, 0):
            return
        host, _handshake, notify_port = peer_address(params, release.address, peer)
        dp = params.get("remote_dp_rank", 0)
        if not isinstance(dp, int):
            raise PeerRefusal("TypeError", f"remote_dp_rank {dp!r} in port arithmetic")
        width = release.call("blocks_ready_width")(params, self.me.tp, peer.tp)
        for tp in range(width):
            port = notify_port + release.call("ports")(dp, tp, peer.tp)
            self.world.log("blocks_ready_sent", self.name, f"port {port}", transfer.index)
            self.world.network.send(
                self.name, (host, port), transfer.index, "remote_blocks",
                lambda rank: rank.on_blocks_ready(transfer_id, transfer, blocks, self.dp),
            )  # fmt: skip

    def report(self, transfer_id: str, failed: bool) -> None:
        """A rank reported the transfer finished; the executor counts reports and does not ask from whom."""
        transfer = self.waiting.get(transfer_id)
        if transfer is None:
            return
        self._reports[transfer_id] = self._reports.get(transfer_id, 0) + 1
        if failed:
            self._failed.add(transfer_id)
        if self._reports[transfer_id] < self.me.tp:
            return
        del self.waiting[transfer_id]
        if transfer_id in self._failed:
            self.fail(transfer, "prefill reported that its blocks never come")
        else:
            self._go(transfer)

    def _go(self, transfer: Transfer) -> None:
        """The scheduler resumes the request: from here on it uses its cells."""
        transfer.went = True
        self.world.log("go", self.name, request=transfer.index)
        for rank in self.ranks:
            rank.look_at_all(transfer)
        step_ns = self.world.timing.decode_layer_ns * self.world.geometry.layers
        self.world.clock.after(step_ns, lambda _event: self._end(transfer))

    # -- READ -------------------------------------------------------------------------------------------------

    def _admit_read(self, transfer: Transfer, params: dict[str, Any]) -> None:
        release = self.me.release
        if not params.get("do_remote_prefill") and release.match_read == "if_do_remote_prefill":
            self._recompute(transfer)
            return
        transfer_id_of(params, release.transfer_id_missing, f"D-{transfer.index}")
        wanted = params.get("do_remote_prefill") and params.get("remote_block_ids") and "remote_engine_id" in params
        leg = read_leg(params, self.me, self.world.setup.prefill, f"D-{transfer.index}") if wanted else None
        self._allocate(transfer)
        self.world.clock.process(self._guarded(transfer, leg))

    def _guarded(self, transfer: Transfer, leg: Leg | None) -> Generator[Any, None, None]:
        try:
            yield from self._step(transfer, leg)
        except PeerRefusal as refusal:
            self.crash(str(refusal), transfer)

    def _step(self, transfer: Transfer, leg: Leg | None) -> Generator[Any, None, None]:
        """The engine step in which the request runs: handshakes, reads, barrier, forward."""
        reads: dict[int, Read] = {}
        if leg is not None:
            yield from self._handshake(leg)
            for rank in self.ranks:
                if self.me.release.read_handshake == "lazy" and not rank.agents:
                    continue  # it warned, and goes on without data
                reads[rank.tp] = rank.plan_read(leg, transfer)
        lands: dict[int, list[int]] = {}
        failed = False
        for rank in self.ranks:
            if rank.tp not in reads:
                continue
            lands[rank.tp], refused = rank.post(reads[rank.tp], transfer)
            failed |= refused
            assert leg is not None
            self._close_read(rank, leg, reads[rank.tp], transfer, lands[rank.tp], refused)
        if failed and self.me.release.read_failure == "load_errors":
            self.fail(transfer, "reads failed")
            return
        yield from self._use(transfer, lands)

    def _handshake(self, leg: Leg) -> Generator[Any, None, None]:
        clock, eager = self.world.clock, self.me.release.read_handshake == "eager_vote"
        dials = 0
        for rank in self.ranks:
            try:
                keys = rank.keys(leg)
            except PeerRefusal as refusal:
                raise PeerRefusal("HandshakeError" if eager else "KeyError", f"no session to prefill: {refusal.text}") from None
            known = len(rank.agents)
            if not rank.dial(leg, keys):
                if eager:
                    self.world.log("stalled", rank.name, detail="handshake vote")
                    yield clock.event()  # the vote never comes: the step never ends
                dials = -1
            elif dials >= 0:
                dials = max(dials, len(rank.agents) - known)
        wait = self.world.setup.transfer_timeout_ns if dials < 0 else dials * self.world.timing.handshake_ns
        if wait:
            yield clock.timeout(wait)

    def _close_read(self, rank: DecodeRank, leg: Leg, read: Read, transfer: Transfer, lands: list[int], refused: bool) -> None:
        """When the read counts as done: note it and release prefill's blocks. A refused read releases as well."""
        at = lands[-1] if self.me.release.read_done == "last_layer" else max(lands)
        clock = self.world.clock

        def close(_event: Any) -> None:
            if not refused:
                self.world.log("told", rank.name, request=transfer.index)
            rank.send_release(leg, read, transfer)

        clock.after(at - clock.now, close)

    def _use(self, transfer: Transfer, lands: dict[int, list[int]]) -> Generator[Any, None, None]:
        """Run the forward; what each layer holds when it is used depends on the barrier."""
        clock, layers, layer_ns = self.world.clock, self.world.geometry.layers, self.world.timing.decode_layer_ns
        barrier = self.me.release.read_barrier
        if barrier == "step":
            last = max((max(times) for times in lands.values()), default=clock.now)
            yield clock.timeout(last + 1 - clock.now)
        transfer.went = True
        self.world.log("go", self.name, request=transfer.index)
        for layer in range(layers):
            if barrier == "per_layer":
                land = max((times[layer] for times in lands.values()), default=clock.now)
                if land >= clock.now:
                    yield clock.timeout(land + 1 - clock.now)
            for rank in self.ranks:
                rank.look(transfer, layer)
            yield clock.timeout(layer_ns)
        self._end(transfer)

    # -- ends -------------------------------------------------------------------------------------------------

    def _recompute(self, transfer: Transfer) -> None:
        transfer.bad_end = "recomputed"
        transfer.ended = True
        self.world.log("recompute", self.name, request=transfer.index)

    def _end(self, transfer: Transfer) -> None:
        if self.crashed:
            return
        self._close(transfer)
        self.world.log("ended", self.name, request=transfer.index)

    def _close(self, transfer: Transfer) -> None:
        """The request is over and its blocks are free again."""
        transfer.ended = True
        transfer.home = None
        self.pool.give_back(transfer.index)

    def fail(self, transfer: Transfer, why: str) -> None:
        transfer.bad_end = transfer.bad_end or "failed"
        self._close(transfer)
        self.world.log("request_failed", self.name, request=transfer.index, detail=why)

    def crash(self, error: str, transfer: Transfer) -> None:
        """The engine, or its step, is lost, and with it every request in it."""
        self.crashed = self.crashed or error
        transfer.bad_end = "crash"
        self.world.log("crashed", self.name, request=transfer.index, detail=error)
