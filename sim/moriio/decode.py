"""The decode engine: a scheduler for each DP rank, and its TP ranks, which are written to, or read themselves in READ.

In WRITE the scheduler tells prefill its blocks and waits until as many ranks as it has reported; nothing ends that wait.
In READ the request runs in the step in which its reads are posted; what holds the forward back is the release's barrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

from kvcover.sim.cache.ledger import Codes
from kvcover.sim.cache.memory import Memory
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import Raised, Why
from kvcover.sim.moriio.decode_rank import DecodeRank
from kvcover.sim.moriio.engine import Engine
from kvcover.sim.moriio.legs import Leg
from kvcover.sim.moriio.rank import Tables
from kvcover.sim.moriio.read_step import LazyReads, ReadStep
from kvcover.sim.moriio.reports import Reports
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.dispatch import Params


class DecodeEngine(Engine):
    """Scheduler and executor of one decode DP rank."""

    ranks: list[DecodeRank]

    def __init__(self, context: Context, dp: int, refuses: Callable[[], str]) -> None:
        fixed = {b for r in context.setup.requests if r.decode_dp == dp for b in r.decode_blocks or ()}
        super().__init__(context, context.setup.decode, dp, fixed, refuses)
        self.ledger = Memory(self.me.groups, self.me.places, self.me.tp)
        self.reports = Reports(self.me.tp, self._all_reported)
        self._step_ns = context.timing.decode_layer_ns * context.geometry.layers
        self.ranks = [DecodeRank(context, dp, tp, self.ledger, self.reports, self._step_ns) for tp in range(self.me.tp)]
        self._queue: deque[tuple[Transfer, Params]] = deque()  # not yet admitted: the pool is full
        self._admitted: list[Transfer] = []  # so far, and not only those that are still here
        self._held_up: set[int] = set()  # requests whose step is held up
        self._to_decode_elsewhere: set[int] = set()  # whose leg says so, as prefill's would
        self.lazy = LazyReads()

    # -- admission --------------------------------------------------------------------------------------------

    def submit(self, transfer: Transfer, params: Params, answer: Any) -> None:
        transfer.decode_dp = self.dp
        super().submit(transfer, params, answer)

    def take(self, transfer: Transfer, params: Params, answer: Any) -> None:
        abort = self.faults.abort(transfer)
        if abort is not None and abort.at == "before":
            self.context.injector.note(abort)
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
            count = self.block_count(transfer.request)
            if not self.crashed and not self.pool.fits(count, transfer.request.decode_blocks):
                return
            self._queue.popleft()
            delay = 0 if self.crashed else self.faults.step_delay("decode")
            if delay:
                self._held_up.add(transfer.index)
                self.context.clock.after(delay, lambda _event, t=transfer, p=params: self._start(t, p))  # type: ignore[misc]
            else:
                self._start(transfer, params)

    def _start(self, transfer: Transfer, params: Params) -> None:
        self._held_up.discard(transfer.index)
        if self.crashed:
            transfer.bad_end = "crash"
            return
        if params.get("do_remote_decode"):
            self._to_decode_elsewhere.add(transfer.index)
        if self.me.release.unsupported == "request_refused" and (why := self.refuses()):
            self.refuse(transfer, why)
            return
        try:
            if self.context.mode == "write":
                self._admit_write(transfer, params)
            else:
                self._admit_read(transfer, params)
        except PeerRefusal as refusal:
            self.refuse_or_crash(transfer, refusal)

    def _allocate(self, transfer: Transfer) -> list[Codes]:
        """Blocks for the whole prompt by block table; those in the prefix cache hold their content already."""
        request = transfer.request
        tables = self.pool.take_tables(request, self.me, request.decode_blocks)
        self.context.log("allocated", self.name, request=request.index)
        transfer.admit(tables, self.ledger)
        self._admitted.append(transfer)
        self.ledger.admit(transfer.index, tables)
        if hit := request.decode_hit_blocks:
            for rank in self.ranks:
                self.ledger.fill(rank.tp, self.me.tp, transfer.index, transfer.contents[:hit], tables)
        return tables

    # -- WRITE ------------------------------------------------------------------------------------------------

    def _admit_write(self, transfer: Transfer, params: Params) -> None:
        release = self.me.release
        wanted = bool(params.get("do_remote_prefill"))
        transfer_id = self.transfer_id(transfer, params) if params else None
        blocks: Tables = [table.tolist() for table in self._allocate(transfer)]
        if params:
            self.reports.map(transfer, str(self.mapped_id(transfer, params)))
        unwanted = not wanted and release.match_write == "if_do_remote_prefill"
        if unwanted or transfer.request.external_zero:
            if not unwanted:
                self.announce.nothing(transfer, params, transfer_id, blocks)
            self.compute_locally(transfer)
            self._report_kept(transfer)
            return
        self.reports.waiting.add(transfer.index)
        if wanted:
            self.announce.blocks(transfer, params, transfer_id, blocks)
        if release.decode_timer == "recv_abort_timeout":
            limit_ns = self.context.setup.recv_abort_timeout_ns
            self.context.clock.after(limit_ns, lambda _event: self._time_out(transfer))
        abort = self.faults.abort(transfer)
        if abort is not None and abort.at == "waiting":
            after_ns = round((abort.ms or 0.0) * 1e6)
            self.context.clock.after(after_ns, lambda _event: self._abort_waiting(transfer, abort))
        self._report_kept(transfer)

    def _report_kept(self, transfer: Transfer) -> None:
        """The step after the request's admission: ranks report what they have heard of its transfer before."""
        if (transfer_id := self.reports.id_of(transfer)) is not None:
            for rank in self.ranks:
                rank.report_kept(transfer_id, transfer)

    def _all_reported(self, transfer: Transfer, failed: bool) -> None:
        """All ranks reported the transfer finished.

        One that does not wait for its KV must not be reported: vLLM's scheduler asserts that in every release.
        """
        if self.crashed:
            return
        index = transfer.index
        if index not in self.reports.waiting:
            if self.me.release.late_report == "crash":
                text = "a transfer is reported finished whose request does not wait for it"
                self.crash(Raised("AssertionError", text, "late_report"), transfer)
            return
        self.reports.waiting.remove(index)
        if transfer.aborted:
            self._close(transfer)
        elif failed:
            self.fail(transfer, "prefill reported that its blocks never come")
        else:
            self._go(transfer)

    def _go(self, transfer: Transfer) -> None:
        """The scheduler resumes the request."""
        self.note_go(transfer)
        for rank in self.ranks:
            rank.look_at_all(transfer)
        self.generate(transfer, self._step_ns)

    def generate(self, transfer: Transfer, first_ns: int) -> None:
        """The request has its first token after `first_ns`, its last one when it has generated for as long as it wants."""
        self.context.clock.after(first_ns + transfer.request.generate_ns, lambda _event: self.end(transfer))

    def _time_out(self, transfer: Transfer) -> None:
        """Nobody said that the blocks are complete, or that they never come, within the receive limit."""
        if transfer.index in self.reports.waiting and not self.crashed:
            self.reports.waiting.remove(transfer.index)
            self.fail(transfer, "the blocks did not come within the receive limit")

    def note_go(self, transfer: Transfer) -> None:
        """From here on the request uses its cells."""
        transfer.went = True
        transfer.go_ns = self.context.clock.now
        self.context.log("go", self.name, request=transfer.index)

    # -- READ -------------------------------------------------------------------------------------------------

    def _admit_read(self, transfer: Transfer, params: Params) -> None:
        release = self.me.release
        if not params.get("do_remote_prefill") and release.match_read == "if_do_remote_prefill":
            self._allocate(transfer)
            self.compute_locally(transfer)
            return
        if params:
            self.mapped_id(transfer, params)
        wanted = params.get("do_remote_prefill") and params.get("remote_block_ids") and "remote_engine_id" in params
        leg = self.read_leg(transfer, params, self.context.setup.prefill) if wanted else None
        skipped = transfer.request.decode_hit_blocks if transfer.request.suffix_only else 0
        nothing = transfer.request.external_zero and release.external_zero_read == "nothing"
        local: Tables = []
        for table, blocks in zip(self.me.tables, self._allocate(transfer), strict=True):
            local.append(blocks.tolist() if table.state else [] if nothing else blocks[skipped:].tolist())  # a state is always read
        self.context.clock.process(self._guarded(transfer, leg, local))

    def _guarded(self, transfer: Transfer, leg: Leg | None, local: list[list[int]]) -> Generator[Any, None, None]:
        try:
            yield from ReadStep(self, transfer).run(leg, local)
        except PeerRefusal as refusal:
            self.crash(Raised.by(refusal), transfer)

    # -- ends -------------------------------------------------------------------------------------------------

    def compute_locally(self, transfer: Transfer) -> None:
        """Decode prefills by itself in blocks that it holds."""
        transfer.bad_end = "recomputed"
        self.context.log("recompute", self.name, request=transfer.index)
        self.generate(transfer, self.context.timing.prefill_layer_ns * self.context.geometry.layers)

    def end(self, transfer: Transfer) -> None:
        """The request has its tokens, unless the scheduler preempts it first."""
        if self.crashed:
            return
        if self.faults.hits("preempt", transfer) and not transfer.preempted:
            self._preempt(transfer)
            return
        abort = self.faults.abort(transfer)
        if abort is not None and abort.at == "after":
            self.context.injector.note(abort)
        if transfer.index in self._to_decode_elsewhere and self.me.release.decode_leg_hold != "freed":
            self._hold(transfer)
        else:
            self._close(transfer)
        self.context.log("ended", self.name, request=transfer.index)

    def _hold(self, transfer: Transfer) -> None:
        """The request is over, and its blocks are kept for a decode elsewhere that nobody does."""
        self.reports.unmap(transfer)
        transfer.finish()
        if self.me.release.decode_leg_hold == "reaped":
            self.context.clock.after(self.context.setup.defer_timeout_ns, lambda _event: self._reap(transfer))

    def _reap(self, transfer: Transfer) -> None:
        transfer.timer_fired = True
        transfer.home = None
        if self.pool.give_back(transfer.index):
            self.context.log("reaped", self.name, request=transfer.index)
        self._admit()

    def _preempt(self, transfer: Transfer) -> None:
        """The scheduler takes the blocks and admits the request again: who brings the KV the second time?"""
        transfer.preempted, transfer.went = True, False
        self._give_back(transfer)
        self.context.log("preempted", self.name, request=transfer.index)
        policy = self.me.release.match_write if self.context.mode == "write" else self.me.release.match_read
        self._allocate(transfer)
        if policy == "if_do_remote_prefill" or transfer.request.external_zero:
            self.compute_locally(transfer)
        elif self.context.mode == "read":
            self.note_go(transfer)
            for rank in self.ranks:
                rank.look_at_all(transfer)
            self.end(transfer)
        else:
            self.reports.waiting.add(transfer.index)  # for a second load that nobody sends

    def _abort_before_allocation(self, transfer: Transfer, params: Params) -> None:
        transfer.aborted = True
        transfer.finish()
        self.context.log("aborted", self.name, request=transfer.index)
        if not params.get("do_remote_prefill"):
            return
        if self.context.mode == "write":
            self.announce.release(transfer, params, params.get("transfer_id"))
            return
        leg = self.read_leg(transfer, params, self.context.setup.prefill)
        if self.me.release.abort_before_read == "raises":
            self.crash(Raised("ValueError", "0 local blocks and some remote blocks", "abort_before_read"), transfer)
            return
        for rank in self.ranks:
            rank.reader.send_release(leg, [target.tp_rank for target in rank.reader.targets(leg)], transfer)

    def _abort_waiting(self, transfer: Transfer, fault: Any) -> None:
        """The client goes while the KV is on its way: the blocks wait for reports that are no longer matched."""
        if transfer.ended or transfer.index not in self.reports.waiting:
            return
        self.context.injector.note(fault)
        if self.me.release.abort_waiting == "leak":
            self.reports.unmap(transfer)
        transfer.aborted = True
        transfer.finish()
        self.context.log("aborted", self.name, request=transfer.index)

    def _close(self, transfer: Transfer) -> None:
        """The request is over and its blocks are free again."""
        self.reports.unmap(transfer)
        self._give_back(transfer)
        transfer.finish()
        self._admit()

    def _give_back(self, transfer: Transfer) -> None:
        transfer.home = None
        if self.pool.give_back(transfer.index):
            self.context.log("freed", self.name, request=transfer.index)

    def fail(self, transfer: Transfer, why: str) -> None:
        """The request ends with an error, or, if the engine is told so, is prefilled here in other blocks."""
        if self.me.side.load_failure == "recompute" and not transfer.aborted:
            self.context.log("load_failed", self.name, request=transfer.index, fields=Why(why))
            self._give_back(transfer)
            self._allocate(transfer)
            self.compute_locally(transfer)
            return
        if not transfer.aborted:
            transfer.bad_end = transfer.bad_end or "failed"
        self._close(transfer)
        self.context.log("request_failed", self.name, request=transfer.index, fields=Why(why))

    def die(self) -> list[int]:
        inside = super().die()
        self._queue.clear()
        for transfer in self._admitted:
            transfer.needs = []  # the memory is gone, and what earlier requests left in it
        return inside

    def not_admitted(self) -> Iterator[int]:
        yield from sorted(self._held_up)
        yield from (transfer.index for transfer, _ in self._queue)

    def cut_off(self, transfer: Transfer) -> bool:
        if transfer.ended:
            return False
        transfer.bad_end = "crash"
        return True

    def crash(self, raised: Raised, transfer: Transfer | None, where: str = "") -> None:
        if transfer is not None:
            transfer.bad_end = "crash"
        super().crash(raised, transfer, where)
