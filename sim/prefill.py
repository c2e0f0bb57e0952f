"""The prefill engine: a scheduler for each DP rank, and its TP ranks, which compute layer by layer.

In WRITE mode each rank's `Writer` pushes what it computed; in READ mode the blocks wait until decode releases them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import PeerRefusal
from sim.ledger import Codes
from sim.legs import Leg, read_leg, transfer_id_of
from sim.rank import Rank
from sim.transfer import BlockPool, Transfer, response_of
from sim.writer import Writer

if TYPE_CHECKING:
    from sim.world import World


class PrefillRank(Rank):
    """TP rank `tp` of one DP rank of prefill."""

    def __init__(self, engine: PrefillEngine, tp: int) -> None:
        super().__init__(engine.world, engine.me.rank_name(engine.dp, tp))
        self.engine = engine
        self.me = engine.me
        self.tp = tp
        self.first_head = self.world.geometry.heads_of(tp, self.me.tp).start
        self.writer = Writer(self)
        self._acks: dict[str, int] = {}
        self._released: set[str] = set()

    def forward(self, batch: list[tuple[Transfer, Leg | None]]) -> Generator[Any, None, None]:
        """Compute all layers for a batch; write each as it is ready, and once more all that handshakes held up."""
        clock, layers, writer = self.world.clock, range(self.world.geometry.layers), self.writer
        layer_ns = self.world.timing.prefill_layer_ns
        jobs = [writer.job(transfer, leg) for transfer, leg in batch if leg is not None and self.world.mode == "write"]
        for layer in layers:
            yield clock.timeout(layer_ns)
            if jobs and (wait := writer.save(jobs, layer)):
                yield clock.timeout(wait)
                writer.after_wait(jobs, layer, wait)
        for layer in layers:
            if writer.held_up(jobs, layer) and (wait := writer.save(jobs, layer)):
                yield clock.timeout(wait)
                writer.after_wait(jobs, layer, wait)
        writer.seal(jobs)

    def on_blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: list[int], decode_dp: int) -> None:
        """Decode's scheduler told us where the blocks go."""
        self.world.log("blocks_ready", self.name, request=transfer.index)
        self.writer.blocks_ready(transfer_id, transfer, blocks, decode_dp)

    def on_release(self, transfer_id: Any, transfer: Transfer, consumer_tp: int, sender: str) -> None:
        """A decode rank no longer needs our blocks (READ); counted until the release's rule is met."""
        self.world.log("release", self.name, sender, transfer.index)
        key = str(transfer_id)
        if key in self._released:
            return
        self._acks[key] = self._acks.get(key, 0) + 1
        if self._acks[key] >= self.me.release.call("acks")(self.me.tp, consumer_tp):
            self._released.add(key)
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
