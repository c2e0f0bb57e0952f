"""The prefill engine: a scheduler for each DP rank, and its TP ranks, which compute layer by layer.

In WRITE mode each rank's `Writer` pushes what it computed; in READ mode the blocks wait until decode releases them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from kvcover.sim.cache.ledger import Codes
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.kernel.events import Counted, Raised, Stall
from kvcover.sim.moriio.engine import Engine
from kvcover.sim.moriio.legs import Leg, is_no_key
from kvcover.sim.moriio.rank import Rank, Tables
from kvcover.sim.moriio.transfer import Transfer, response_of
from kvcover.sim.moriio.write_job import Job
from kvcover.sim.moriio.writer import Writer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.dispatch import Params


class PrefillRank(Rank):
    """TP rank `tp` of one DP rank of prefill."""

    def __init__(self, engine: PrefillEngine, tp: int) -> None:
        super().__init__(engine.context, engine.me, engine.dp, tp)
        self.engine = engine
        self.writer = Writer(self, engine.contents, self._report)
        self._acks: dict[str, int] = {}
        self._released: set[str] = set()

    def forward(self, batch: list[tuple[Transfer, Leg | None]]) -> Generator[Any, None, None]:
        """Compute all layers for a batch; write each as it is ready, and once more all that handshakes held up.

        `batch` holds the leg of those requests whose last chunk this is.
        """
        clock, layers, writer, engine = self.context.clock, range(self.context.geometry.layers), self.writer, self.engine
        layer_ns = self.context.timing.prefill_layer_ns
        jobs = [writer.job(transfer, leg) for transfer, leg in batch if leg is not None and self.context.mode == "write"]
        for layer in layers:
            yield clock.timeout(layer_ns)
            if self.gone:
                return
            if self.stalls:
                yield from self._stand_still()
            if self.me.side.collectives:
                yield engine.meet()
            if jobs and (wait := writer.save(jobs, layer)):
                yield from self._wait(wait)
                writer.after_wait(jobs, layer, wait)
        for layer in layers:
            if writer.held_up(jobs, layer) and (wait := writer.save(jobs, layer)):
                yield from self._wait(wait)
                writer.after_wait(jobs, layer, wait)
        yield from writer.seal(jobs)

    def die(self) -> None:
        super().die()
        self.writer.end()

    def _wait(self, wait_ns: int) -> Generator[Any, None, None]:
        """The forward stands still in a layer; the executor kills the engine if that makes the step too long."""
        clock, engine = self.context.clock, self.engine
        left = engine.step_limit_at - clock.now
        if wait_ns > left:
            yield clock.timeout(max(left, 0))
            raise PeerRefusal("TimeoutError", f"the executor waited {self.me.side.executor_timeout_s} s for a step")
        yield clock.timeout(wait_ns)

    def _stand_still(self) -> Generator[Any, None, None]:
        """A planned stall of this rank; in a collective the others wait for it."""
        clock = self.context.clock
        while (until := self.stalled_until(clock.now)) > clock.now:
            self.context.log("stalled", self.name, fields=Stall(until - clock.now))
            yield from self._wait(until - clock.now)

    def _report(self, job: Job) -> None:
        """Report a transfer finished, whether it went well or not."""
        # A rank whose id the scheduler doesn't map is never matched to a request, nor, in most releases, is no id at all.
        known = job.id in self.engine.known
        if job.leg is None or (known and (job.leg.transfer_id is not None or self.me.release.null_id == "matched")):
            self.engine.report(job.transfer, self.name)

    def on_blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: Tables, decode_dp: int) -> None:
        """Decode's scheduler told us where the blocks go."""
        if not blocks:
            self.poison("an empty remote_blocks", transfer, "D")
            return
        self.context.log("blocks_ready", self.name, request=transfer.index)
        if is_no_key(transfer_id):
            self.poison("a remote_blocks whose id can be no key", transfer, "D")
            return
        self.writer.blocks_ready(transfer_id, transfer, blocks, decode_dp)

    def on_release(self, transfer_id: Any, transfer: Transfer, consumer_tp: int, sender: str) -> None:
        """Decode no longer needs our blocks; counted until the release's rule is met. In WRITE it never needed them."""
        self.context.log("release", self.name, sender, transfer.index)
        key = str(transfer_id)
        if key in self._released or key not in self.engine.known:
            return
        if self.context.mode == "write":
            self.writer.drop(transfer_id, transfer)
        self._acks[key] = self._acks.get(key, 0) + 1
        try:
            wanted = self.me.release.call("acks")(self.me.tp, consumer_tp)
        except PeerRefusal as refusal:
            self.engine.crash(Raised.by(refusal), transfer, self.name)
            return
        if self._acks[key] >= wanted:
            self._released.add(key)
            self.engine.report(self.engine.known[key], self.name, Counted(wanted))  # the last that came with this id


class Waiting:
    """A request in the prefill engine: what is computed of it, and the event that the router waits for."""

    def __init__(self, transfer: Transfer, params: Params, leg: Leg | None, answer: Any) -> None:
        self.transfer = transfer
        self.params = params
        self.leg = leg
        self.answer = answer
        self.computed = 0
        self.saved = False


class PrefillEngine(Engine):
    """Scheduler and executor of one prefill DP rank."""

    ranks: list[PrefillRank]

    def __init__(self, context: Context, dp: int, refuses: Callable[[], str]) -> None:
        fixed = {b for r in context.setup.requests if r.prefill_dp == dp for b in r.prefill_blocks or ()}
        super().__init__(context, context.setup.prefill, dp, fixed, refuses)
        self.contents: Codes = np.zeros(self.me.shape.num_blocks, dtype=np.int64)
        self._arrived = 0  # ranks that wait in the collective of a layer
        self._all_met = context.clock.event()
        self._died = context.clock.event()
        self.step_limit_at = 0
        self.ranks = [PrefillRank(self, tp) for tp in range(self.me.tp)]
        self._queue: deque[Waiting] = deque()  # not yet admitted: the pool is full
        self._running: list[Waiting] = []
        self._stepping = False
        self._reports: dict[int, int] = {}
        self._finished: set[int] = set()
        self._last_owner: dict[int, Transfer] = {}
        self.known: dict[str, Transfer] = {}  # by transfer id
        self._reaped: set[int] = set()

    def submit(self, transfer: Transfer, params: Params, answer: Any) -> None:
        transfer.prefill_dp = self.dp
        super().submit(transfer, params, answer)

    def take(self, transfer: Transfer, params: Params, answer: Any) -> None:
        if self.crashed:
            answer.succeed(None)
            return
        if self.me.release.unsupported == "request_refused" and (why := self.refuses()):
            self.refuse(transfer, why)
            answer.succeed(None)
            return
        try:
            mapped = self.mapped_id(transfer, params) if params else None
            leg = self._read(transfer, params)
        except PeerRefusal as refusal:
            self.refuse_or_crash(transfer, refusal)
            answer.succeed(None)
            return
        if params.get("do_remote_decode"):
            self.known[str(mapped)] = transfer
        self._queue.append(Waiting(transfer, params, leg, answer))
        self._start()

    def _start(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.context.clock.process(self._steps())

    def _read(self, transfer: Transfer, params: Params) -> Leg | None:
        """The leg as a write job needs it; None for a request that is not to be decoded elsewhere."""
        if not params.get("do_remote_decode"):
            return None
        if self.context.mode == "read" and self.me.release.prefill_leg_read == "write_only":
            self.transfer_id(transfer, params)
            return None
        return self.read_leg(transfer, params, self.context.setup.decode)

    # -- steps ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give blocks to waiting requests, in order, as long as there are some."""
        while self._queue and not self.crashed:
            waiting = self._queue[0]
            request = waiting.transfer.request
            count = self.block_count(request)
            if not self.pool.fits(count, request.prefill_blocks):
                return
            tables = self.pool.take_tables(request, self.me, request.prefill_blocks)
            for block in (block for table in tables for block in table.tolist()):
                if (last := self._last_owner.get(block)) is not None:
                    last.source_reused = True
                self._last_owner[block] = waiting.transfer
            waiting.transfer.prefill_tables = tables
            self.context.log("allocated", self.name, request=request.index)
            for blocks in tables:
                self.contents[blocks] = 0
            self._running.append(self._queue.popleft())
            self._announce(waiting)

    def _announce(self, waiting: Waiting) -> None:
        """A leg that asks prefill for a remote prefill: its scheduler tells its own ranks what decode's would tell them."""
        params, transfer = waiting.params, waiting.transfer
        if self.context.mode != "write" or not params.get("do_remote_prefill"):
            return
        assert transfer.prefill_tables is not None
        try:
            blocks = [table.tolist() for table in transfer.prefill_tables]
            self.announce.nothing(transfer, params, self.transfer_id(transfer, params), blocks)
        except PeerRefusal as refusal:
            self.refuse_or_crash(transfer, refusal)

    def _steps(self) -> Generator[Any, None, None]:
        """Run admitted requests in batches, chunk by chunk, until there are none."""
        clock = self.context.clock
        yield clock.timeout(1)  # legs that arrive at one instant are in one step, as on the real connector
        self._admit()
        while self._running and not self.crashed:
            if (delay := self.faults.step_delay("prefill")) > 0:
                yield clock.timeout(delay)
            chunk = self._next_chunk()
            if not chunk:
                break  # the scheduler died over it
            limit_s = self.me.side.executor_timeout_s
            self.step_limit_at = NEVER if limit_s is None else clock.now + round(limit_s * 1e9)
            forwards = [clock.process(self._guarded(rank, chunk)) for rank in self.ranks]
            yield clock.all_of(forwards) | self._died  # a rank that died leaves others waiting in a collective
            self._conclude_step()
            self._admit()
        if self.crashed:
            for waiting in (*self._running, *self._queue):
                waiting.answer.succeed(None)
            self._running, self._queue = [], deque()
        self._stepping = False

    def _next_chunk(self) -> list[tuple[Transfer, Leg | None]]:
        """Whom this step computes, each with its leg if it is to be written in this step."""
        budget = self.me.side.max_tokens_per_step or NEVER
        chunk: list[tuple[Transfer, Leg | None]] = []
        for waiting in self._running:
            tokens = min(budget, waiting.transfer.request.prompt_tokens - waiting.computed)
            if tokens <= 0:
                continue
            if self._stumbles(waiting):
                return []
            budget -= tokens
            waiting.computed += tokens
            last = self._is_last_chunk(waiting) and not waiting.saved
            waiting.saved |= last
            chunk.append((waiting.transfer, waiting.leg if last else None))
            self._fill(waiting)
        return chunk

    def _stumbles(self, waiting: Waiting) -> bool:
        """The scheduler looks a request up whose prompt goes on; some releases insist that they have it (K34)."""
        again = waiting.computed > 0 and self.context.mode == "write" and not waiting.params.get("do_remote_decode")
        if not again or self.me.release.plain_chunks != "key_error":
            return False
        self.crash(Raised("KeyError", f"'P-{waiting.transfer.index}'", "plain_chunks"), waiting.transfer)
        return True

    def _is_last_chunk(self, waiting: Waiting) -> bool:
        """Whether the release takes this chunk for the last, and so writes the request in it."""
        prompt = waiting.transfer.request.prompt_tokens
        if self.me.release.last_chunk == "by_tokens":
            return waiting.computed >= prompt
        block_size = self.me.shape.block_size
        allocated = -(-(waiting.computed + self.me.side.lookahead_tokens) // block_size)
        return allocated * block_size >= prompt

    def _fill(self, waiting: Waiting) -> None:
        """The blocks whose tokens are all computed hold their content; the last block of a prompt may be part full."""
        transfer = waiting.transfer
        assert transfer.prefill_tables is not None
        done = waiting.computed >= transfer.request.prompt_tokens
        full = transfer.request.prefill_size if done else waiting.computed // self.me.shape.block_size
        for table, blocks in zip(self.me.tables, transfer.prefill_tables, strict=True):
            held = table.contents(transfer.prefill_contents[:full], transfer.state[: int(done)])
            self.contents[blocks[: len(held)]] = held

    def _guarded(self, rank: PrefillRank, chunk: list[tuple[Transfer, Leg | None]]) -> Generator[Any, None, None]:
        try:
            yield from rank.forward(chunk)
        except PeerRefusal as refusal:
            self.crash(Raised.by(refusal), chunk[0][0], rank.name)

    def meet(self) -> Any:
        """A collective: the event on which a rank waits until all ranks of the engine are there."""
        met = self._all_met
        self._arrived += 1
        if self._arrived == self.me.tp:
            self._arrived, self._all_met = 0, self.context.clock.event()
            met.succeed()
        return met

    def _conclude_step(self) -> None:
        """Answer the router for every request whose prompt is computed."""
        still = []
        for waiting in self._running:
            if self.crashed or waiting.computed < waiting.transfer.request.prompt_tokens:
                still.append(waiting)
            else:
                stopped = self.faults.hits("stop-at-prefill", waiting.transfer)
                self._finish(waiting.transfer, waiting.params, stopped)
                remote = waiting.params.get("do_remote_decode") and not stopped
                waiting.answer.succeed(response_of(waiting.params, self.me, self.dp, waiting.transfer) if remote else {})
        self._running = still

    # -- blocks -----------------------------------------------------------------------------------------------

    def _finish(self, transfer: Transfer, params: Params, stopped: bool) -> None:
        """The prompt is computed: keep the blocks for decode, with or without a timer, or free them."""
        if not params.get("do_remote_decode") or stopped:
            self._free(transfer, "freed")
            self._free_if_reported(transfer)
            return
        self._finished.add(transfer.index)
        if self.me.release.reaper == "both_modes" or self.context.mode == "read":
            self.context.clock.after(self.context.setup.defer_timeout_ns, lambda _event: self._reap(transfer))
        self._free_if_reported(transfer)

    def _reap(self, transfer: Transfer) -> None:
        """The timer of blocks that nobody asked for. The id is forgotten with them: a later release is nobody's (measured)."""
        if transfer.index in self.pool.held:
            self.known = {key: known for key, known in self.known.items() if known is not transfer}
            self._reaped.add(transfer.index)
        self._free(transfer, "reaped")

    def report(self, transfer: Transfer, rank: str, counted: Counted | None = None) -> None:
        """A rank reported the transfer finished; the executor counts reports and does not ask from whom."""
        if transfer.index in self._reaped:
            return
        self.context.log("released", rank, request=transfer.index, fields=counted)
        self._reports[transfer.index] = self._reports.get(transfer.index, 0) + 1
        self._free_if_reported(transfer)

    def _free_if_reported(self, transfer: Transfer) -> None:
        reports = self._reports.get(transfer.index, 0)
        if reports < self.me.tp or self.crashed:
            return
        if transfer.index not in self.pool.held:
            if reports == self.me.tp and self.me.release.early_ack == "crash":
                raised = Raised("AssertionError", "finished sending for a request that is not held", "early_ack")
                self.crash(raised, transfer)
        elif transfer.index in self._finished:
            self._free(transfer, "freed")

    def _free(self, transfer: Transfer, kind: str) -> None:
        if self.pool.give_back(transfer.index):
            transfer.timer_fired |= kind == "reaped"
            self.context.log(kind, self.name, request=transfer.index)
            self._start()

    def not_admitted(self) -> Iterator[int]:
        return (waiting.transfer.index for waiting in self._queue)

    def cut_off(self, transfer: Transfer) -> bool:
        """Prefill's part may be over; if not, the router finds that out when it waits for prefill's answer."""
        if not transfer.went:
            transfer.bad_end = "crash"
        return False

    def crash(self, raised: Raised, transfer: Transfer | None, where: str = "") -> None:
        if not self.crashed:
            self._died.succeed()
        super().crash(raised, transfer, where)
