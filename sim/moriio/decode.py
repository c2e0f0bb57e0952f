"""The decode engine: a scheduler for each DP rank, and its TP ranks, which are written to, or read themselves in READ.

In WRITE the scheduler tells prefill its blocks and waits until as many ranks as it has reported; nothing ends that wait.
In READ the request runs in the step in which its reads are posted; what holds the forward back is the release's barrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from kvcover.sim.cache.ledger import Codes, Copy, Count
from kvcover.sim.cache.memory import Memory
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import ASTRAY, Raised, Short, Stray, Why
from kvcover.sim.moriio.announce import Announcer
from kvcover.sim.moriio.legs import Leg, mapped_id_of, read_leg, transfer_id_of
from kvcover.sim.moriio.rank import Rank, Tables
from kvcover.sim.moriio.read_step import ReadStep
from kvcover.sim.moriio.reader import Reader, Source
from kvcover.sim.moriio.transfer import BlockPool, Transfer

if TYPE_CHECKING:
    from kvcover.sim.world import World


class DecodeRank(Rank):
    """TP rank `tp` of one DP rank of decode; its memory is row `tp` of the engine's ledger."""

    def __init__(self, engine: DecodeEngine, tp: int) -> None:
        super().__init__(engine.world, engine.me.rank_name(engine.dp, tp))
        self.engine = engine
        self.me = engine.me
        self.tp = tp
        self.reader = Reader(self, engine.dp)
        self.messages: dict[str, int] = {}
        self._reported_ns: dict[str, int] = {}  # when it last reported each transfer
        # Transfers that it would report and that no request here has (yet), and whether they failed. The connector keeps
        # at most 4096 failures, as many as a scenario has requests.
        self._unmatched: dict[str, bool] = {}

    def land(self, layer: int, copy: Copy, transfer: Transfer, source: str, kind: str) -> None:
        """A batch landed here. What it changes outside this request's own cells is astray."""
        engine, world = self.engine, self.world
        mine = transfer.home is engine
        if mine and not copy.by_unit and transfer.own_blocks_only:
            engine.ledger.land(self.tp, layer, transfer.index, copy)
        else:
            self._count_stray(engine.ledger.land_astray(self.tp, layer, copy, transfer.index if mine else None), transfer, layer)
        now = world.clock.now
        if not transfer.went:
            transfer.landed_ns = now
        world.history.rows.append((now, kind, source, self.name, transfer.index, layer, None if mine else ASTRAY))

    def on_write_done(self, transfer_id: Any, transfer: Transfer, writers: int, sender: str) -> None:
        """A prefill rank says that it wrote; complete at once, or when all writers said so."""
        if not isinstance(transfer_id, str):
            return  # the sender refuses to send an id that is no string
        count = self.messages.get(transfer_id, 0) + 1
        if self.me.release.completion == "all_writers" and count < writers:
            self.messages[transfer_id] = count
            return
        self.messages.pop(transfer_id, None)
        if self.engine.maps(transfer_id):  # else the rank reports nothing (measured)
            self.world.log("told", self.name, sender, transfer.index)
        self._report(transfer_id, failed=False)

    def on_write_failed(self, transfer_id: Any, transfer: Transfer, sender: str) -> None:
        """A prefill rank says that nothing was or will be written; an older release does not know the message."""
        if self.me.release.write_failed_heard == "unknown":
            self.poison("write_failed is unknown to this release", transfer, sender)
            return
        key = str(transfer_id)
        self.messages.pop(key, None)
        self.world.log("told_failed", self.name, sender, transfer.index)
        self._report(key, failed=True)

    def _report(self, transfer_id: str, failed: bool) -> None:
        """Tell the engine; what the rank hears twice within a step is one report, and what nobody waits for is kept."""
        now = self.world.clock.now
        if now - self._reported_ns.get(transfer_id, -(1 << 62)) < self.engine.step_ns:
            return
        self._reported_ns[transfer_id] = now
        if not self.engine.report(transfer_id, failed):
            self._unmatched[transfer_id] = failed or self._unmatched.get(transfer_id, False)

    def report_kept(self, transfer_id: str) -> None:
        """A request has this transfer from now on: report what came before it."""
        if (failed := self._unmatched.pop(transfer_id, None)) is None:
            return
        if not failed:
            self.world.log("told", self.name, request=self.engine.request_of(transfer_id))
        self.engine.report(transfer_id, failed)

    def look(self, transfer: Transfer, layer: int) -> None:
        """Decode uses this layer now: note what is there."""
        if self.gone:
            return
        self._used(transfer, layer, self.engine.ledger.count(self.tp, layer, transfer.index, transfer.needs[self.tp]))

    def look_at_all(self, transfer: Transfer) -> None:
        """Decode uses all layers from now on."""
        self._used(transfer, -1, self.engine.ledger.count_all(self.tp, transfer.index, transfer.needs[self.tp]))

    def _used(self, transfer: Transfer, layer: int, count: Count) -> None:
        transfer.used(self.tp, count)
        if count.covered < count.cells:
            self.world.log("short", self.name, "", transfer.index, layer, Short(count.covered, count.cells))

    def _count_stray(self, cells: int, transfer: Transfer, layer: int) -> None:
        if cells:
            self.world.stray += cells
            self.world.log("stray", self.name, "", transfer.index, layer, Stray(cells))


class DecodeEngine:
    """Scheduler and executor of one decode DP rank."""

    def __init__(self, world: World, dp: int) -> None:
        self.world = world
        self.me = world.setup.decode
        self.dp = dp
        self.name = self.me.letter + (str(dp) if self.me.dp > 1 else "")
        fixed = {b for r in world.setup.requests if r.decode_dp == dp for b in r.decode_blocks or ()}
        self.pool = BlockPool(self.me.shape.num_blocks, fixed)
        self.ledger = Memory(self.me.groups, self.me.places, self.me.tp)
        self.announce = Announcer(world, self.me, dp, self.name)
        self.crashed = False
        self.started = True
        self._early: list[tuple[Transfer, dict[str, Any]]] = []  # legs that came before all ranks were there
        self.ranks = [DecodeRank(self, tp) for tp in range(self.me.tp)]
        self.step_ns = world.timing.decode_layer_ns * world.geometry.layers
        self._queue: deque[tuple[Transfer, dict[str, Any]]] = deque()  # not yet admitted: the pool is full
        self._held_up: set[int] = set()  # requests whose step is held up
        self._mapped: dict[str, Transfer] = {}  # by transfer id, from admission to the request's end
        self._id_of: dict[int, str] = {}  # by request
        self._waiting: set[int] = set()  # requests that wait for their KV
        self._reports: dict[int, int] = {}
        self._failed: set[int] = set()
        # READ with lazy handshakes: when a step began to dial and how long it waits, and the reads that it put off
        self.dialling = (-1, 0)
        self.put_off: deque[tuple[ReadStep, Leg, list[list[int]]]] = deque()

    def start(self) -> None:
        """All ranks are there: take what has come so far."""
        self.started = True
        early, self._early = self._early, []
        for transfer, params in early:
            self.submit(transfer, params)

    # -- admission --------------------------------------------------------------------------------------------

    def submit(self, transfer: Transfer, params: dict[str, Any]) -> None:
        """A leg arrived at the scheduler."""
        transfer.decode_dp = self.dp
        if not self.started:
            self._early.append((transfer, params))
            return
        abort = self.world.planned_abort(transfer)
        if abort is not None and abort.at == "before":
            self.world.injector.note(abort)
            try:
                self._abort_before_allocation(transfer, params)
            except PeerRefusal as refusal:
                self.crash(Raised.by(refusal), transfer)
            return
        self._queue.append((transfer, params))
        self._admit()

    def _admit(self) -> None:
        """Give blocks to waiting requests, in order, as long as there are some."""
        while self._queue:
            transfer, params = self._queue[0]
            count = self.world.block_count(transfer.request, self.me)
            if not self.crashed and not self.pool.fits(count, transfer.request.decode_blocks):
                return
            self._queue.popleft()
            delay = 0 if self.crashed else self.world.step_delay("decode")
            if delay:
                self._held_up.add(transfer.index)
                self.world.clock.after(delay, lambda _event, t=transfer, p=params: self._start(t, p))  # type: ignore[misc]
            else:
                self._start(transfer, params)

    def _start(self, transfer: Transfer, params: dict[str, Any]) -> None:
        self._held_up.discard(transfer.index)
        if self.crashed:
            transfer.bad_end = "crash"
            return
        if self.me.release.unsupported == "request_refused" and (why := self.world.refuses()):
            self.world.refuse(transfer, self.name, why)
            return
        try:
            if self.world.mode == "write":
                self._admit_write(transfer, params)
            else:
                self._admit_read(transfer, params)
        except PeerRefusal as refusal:
            if self.me.release.leg_error == "request_refused":
                self.world.refuse(transfer, self.name, refusal.text)
            else:
                self.crash(Raised.by(refusal), transfer)

    def _allocate(self, transfer: Transfer) -> list[Codes]:
        """Blocks for the whole prompt by block table; those in the prefix cache hold their content already."""
        request = transfer.request
        tables = self.pool.take_tables(request, self.me, request.decode_blocks)
        self.world.log("allocated", self.name, request=request.index)
        transfer.admit(tables, self)
        self.ledger.admit(transfer.index, tables)
        if hit := request.decode_hit_blocks:
            for rank in self.ranks:
                self.ledger.fill(rank.tp, self.me.tp, transfer.index, transfer.contents[:hit], tables)
        return tables

    # -- WRITE ------------------------------------------------------------------------------------------------

    def _admit_write(self, transfer: Transfer, params: dict[str, Any]) -> None:
        release = self.me.release
        wanted = bool(params.get("do_remote_prefill"))
        transfer_id = transfer_id_of(params, release.transfer_id_missing, f"D-{transfer.index}") if params else None
        blocks: Tables = [table.tolist() for table in self._allocate(transfer)]
        if params:
            self._map(transfer, str(self._mapped_id(transfer, params)))
        unwanted = not wanted and release.match_write == "if_do_remote_prefill"
        if unwanted or transfer.request.external_zero:
            if not unwanted:
                self.announce.nothing(transfer, params, transfer_id, blocks)
            self.compute_locally(transfer)
            self._report_kept(transfer)
            return
        self._waiting.add(transfer.index)
        if wanted:
            self.announce.blocks(transfer, params, transfer_id, blocks)
        if release.decode_timer == "recv_abort_timeout":
            limit_ns = self.world.setup.recv_abort_timeout_ns
            self.world.clock.after(limit_ns, lambda _event: self._time_out(transfer))
        abort = self.world.planned_abort(transfer)
        if abort is not None and abort.at == "waiting":
            after_ns = round((abort.ms or 0.0) * 1e6)
            self.world.clock.after(after_ns, lambda _event: self._abort_waiting(transfer, abort))
        self._report_kept(transfer)

    def _mapped_id(self, transfer: Transfer, params: dict[str, Any]) -> Any:
        return mapped_id_of(params, self.me.release.transfer_id_missing, f"D-{transfer.index}")

    def _map(self, transfer: Transfer, transfer_id: str) -> None:
        self._mapped[transfer_id] = transfer
        self._id_of[transfer.index] = transfer_id

    def _report_kept(self, transfer: Transfer) -> None:
        """The step after the request's admission: ranks report what they have heard of its transfer before."""
        if (transfer_id := self._id_of.get(transfer.index)) is not None:
            for rank in self.ranks:
                rank.report_kept(transfer_id)

    def request_of(self, transfer_id: str) -> int:
        """The number of the request that has this transfer now."""
        return self._mapped[transfer_id].index

    def maps(self, transfer_id: str) -> bool:
        """Whether a request here has this transfer now."""
        return transfer_id in self._mapped

    def report(self, transfer_id: str, failed: bool) -> bool:
        """A rank reported the transfer finished; the executor counts reports and does not ask from whom.

        Returns False if no request here has it. One that does not wait for its KV must not be reported: vLLM's
        scheduler asserts that in every release.
        """
        transfer = self._mapped.get(transfer_id)
        if transfer is None:
            return False
        index = transfer.index
        self._reports[index] = self._reports.get(index, 0) + 1
        if failed:
            self._failed.add(index)
        if self._reports[index] < self.me.tp or self.crashed:
            return True
        del self._reports[index]
        failed = index in self._failed
        self._failed.discard(index)
        if index not in self._waiting:
            if self.me.release.late_report == "crash":
                text = "a transfer is reported finished whose request does not wait for it"
                self.crash(Raised("AssertionError", text, "late_report"), transfer)
            return True
        self._waiting.remove(index)
        if transfer.aborted:
            self._close(transfer)
        elif failed:
            self.fail(transfer, "prefill reported that its blocks never come")
        else:
            self._go(transfer)
        return True

    def _go(self, transfer: Transfer) -> None:
        """The scheduler resumes the request."""
        self.note_go(transfer)
        for rank in self.ranks:
            rank.look_at_all(transfer)
        self.generate(transfer, self.step_ns)

    def generate(self, transfer: Transfer, first_ns: int) -> None:
        """The request has its first token after `first_ns`, its last one when it has generated for as long as it wants."""
        self.world.clock.after(first_ns + transfer.request.generate_ns, lambda _event: self.end(transfer))

    def _time_out(self, transfer: Transfer) -> None:
        """Nobody said that the blocks are complete, or that they never come, within the receive limit."""
        if transfer.index in self._waiting and not self.crashed:
            self._waiting.remove(transfer.index)
            self.fail(transfer, "the blocks did not come within the receive limit")

    def note_go(self, transfer: Transfer) -> None:
        """From here on the request uses its cells."""
        transfer.went = True
        transfer.go_ns = self.world.clock.now
        self.world.log("go", self.name, request=transfer.index)

    # -- READ -------------------------------------------------------------------------------------------------

    def _admit_read(self, transfer: Transfer, params: dict[str, Any]) -> None:
        release = self.me.release
        if not params.get("do_remote_prefill") and release.match_read == "if_do_remote_prefill":
            self._allocate(transfer)
            self.compute_locally(transfer)
            return
        if params:
            self._mapped_id(transfer, params)
        wanted = params.get("do_remote_prefill") and params.get("remote_block_ids") and "remote_engine_id" in params
        leg = self._read_leg(transfer, params) if wanted else None
        skipped = transfer.request.decode_hit_blocks if transfer.request.suffix_only else 0
        nothing = transfer.request.external_zero and release.external_zero_read == "nothing"
        local: Tables = []
        for table, blocks in zip(self.me.tables, self._allocate(transfer), strict=True):
            local.append(blocks.tolist() if table.state else [] if nothing else blocks[skipped:].tolist())  # a state is always read
        self.world.clock.process(self._guarded(transfer, leg, local))

    def _read_leg(self, transfer: Transfer, params: dict[str, Any]) -> Leg:
        peer = self.world.setup.prefill
        return read_leg(params, self.me, peer, f"D-{transfer.index}", self.world.named_ports(transfer, peer))

    def _guarded(self, transfer: Transfer, leg: Leg | None, local: list[list[int]]) -> Generator[Any, None, None]:
        try:
            yield from ReadStep(self, transfer).run(leg, local)
        except PeerRefusal as refusal:
            self.crash(Raised.by(refusal), transfer)

    # -- ends -------------------------------------------------------------------------------------------------

    def compute_locally(self, transfer: Transfer) -> None:
        """Decode prefills by itself in blocks that it holds."""
        transfer.bad_end = "recomputed"
        self.world.log("recompute", self.name, request=transfer.index)
        self.generate(transfer, self.world.timing.prefill_layer_ns * self.world.geometry.layers)

    def end(self, transfer: Transfer) -> None:
        """The request has its tokens, unless the scheduler preempts it first."""
        if self.crashed:
            return
        if self.world.planned_for("preempt", transfer) and not transfer.preempted:
            self._preempt(transfer)
            return
        abort = self.world.planned_abort(transfer)
        if abort is not None and abort.at == "after":
            self.world.injector.note(abort)
        self._close(transfer)
        self.world.log("ended", self.name, request=transfer.index)

    def _preempt(self, transfer: Transfer) -> None:
        """The scheduler takes the blocks and admits the request again: who brings the KV the second time?"""
        transfer.preempted, transfer.went = True, False
        self._give_back(transfer)
        self.world.log("preempted", self.name, request=transfer.index)
        policy = self.me.release.match_write if self.world.mode == "write" else self.me.release.match_read
        self._allocate(transfer)
        if policy == "if_do_remote_prefill" or transfer.request.external_zero:
            self.compute_locally(transfer)
        elif self.world.mode == "read":
            self.note_go(transfer)
            for rank in self.ranks:
                rank.look_at_all(transfer)
            self.end(transfer)
        else:
            self._waiting.add(transfer.index)  # for a second load that nobody sends

    def _abort_before_allocation(self, transfer: Transfer, params: dict[str, Any]) -> None:
        transfer.aborted = True
        transfer.finish()
        self.world.log("aborted", self.name, request=transfer.index)
        if not params.get("do_remote_prefill"):
            return
        if self.world.mode == "write":
            self.announce.release(transfer, params, params.get("transfer_id"))
            return
        leg = self._read_leg(transfer, params)
        if self.me.release.abort_before_read == "raises":
            self.crash(Raised("ValueError", "0 local blocks and some remote blocks", "abort_before_read"), transfer)
            return
        for rank in self.ranks:
            anyone = self.world.prefills[0].ranks[0]
            sources = [Source(target.tp_rank, anyone, []) for target in rank.reader.targets(leg)]
            rank.reader.send_release(leg, sources, transfer)

    def _abort_waiting(self, transfer: Transfer, fault: Any) -> None:
        """The client goes while the KV is on its way: the blocks wait for reports that are no longer matched."""
        if transfer.ended or transfer.index not in self._waiting:
            return
        self.world.injector.note(fault)
        if self.me.release.abort_waiting == "leak":
            self._unmap(transfer)
        transfer.aborted = True
        transfer.finish()
        self.world.log("aborted", self.name, request=transfer.index)

    def _close(self, transfer: Transfer) -> None:
        """The request is over and its blocks are free again."""
        self._unmap(transfer)
        self._give_back(transfer)
        transfer.finish()
        self._admit()

    def _unmap(self, transfer: Transfer) -> None:
        """The request ended: its transfer id means nothing here any more, even if another request has it by now."""
        if (transfer_id := self._id_of.pop(transfer.index, None)) is not None:
            self._mapped.pop(transfer_id, None)

    def _give_back(self, transfer: Transfer) -> None:
        transfer.home = None
        if self.pool.give_back(transfer.index):
            self.world.log("freed", self.name, request=transfer.index)

    def fail(self, transfer: Transfer, why: str) -> None:
        """The request ends with an error, or, if the engine is told so, is prefilled here in other blocks."""
        if self.me.side.load_failure == "recompute" and not transfer.aborted:
            self.world.log("load_failed", self.name, request=transfer.index, fields=Why(why))
            self._give_back(transfer)
            self._allocate(transfer)
            self.compute_locally(transfer)
            return
        if not transfer.aborted:
            transfer.bad_end = transfer.bad_end or "failed"
        self._close(transfer)
        self.world.log("request_failed", self.name, request=transfer.index, fields=Why(why))

    def die(self) -> list[int]:
        """All processes of the engine end. Returns the requests that were in it."""
        for rank in self.ranks:
            rank.die()
        inside = [*self.pool.held, *sorted(self._held_up), *(each[0].index for each in (*self._queue, *self._early))]
        self.pool.held.clear()
        self._queue.clear()
        for transfer in self.world.transfers:
            if transfer.decode_dp == self.dp:
                transfer.needs = []  # the memory is gone, and what earlier requests left in it
        return inside

    def crash(self, raised: Raised, transfer: Transfer | None, where: str = "") -> None:
        """The engine, or its step, is lost, and with it every request in it."""
        if transfer is not None:
            transfer.bad_end = "crash"
        if not self.crashed:
            self.crashed = True
            self.world.log("crashed", where or self.name, request=transfer.index if transfer else -1, fields=raised)
