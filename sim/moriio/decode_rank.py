"""A decode rank: what lands in its memory, what prefill's ranks tell it, and what is there when decode uses it."""

from __future__ import annotations

from typing import Any

from kvcover.sim.cache.ledger import Copy, Count
from kvcover.sim.cache.memory import Memory
from kvcover.sim.kernel.events import ASTRAY, Counted, Short, Stray
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.reader import Reader
from kvcover.sim.moriio.reports import Reports
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context


class DecodeRank(Rank):
    """TP rank `tp` of decode DP rank `dp`; its memory is row `tp` of the engine's `ledger`. An engine step takes `step_ns`."""

    def __init__(self, context: Context, dp: int, tp: int, ledger: Memory, reports: Reports, step_ns: int) -> None:
        super().__init__(context, context.setup.decode, dp, tp)
        self.reader = Reader(self)
        self._ledger = ledger
        self._reports = reports
        self._step_ns = step_ns
        self.messages: dict[str, int] = {}
        self._reported_ns: dict[str, int] = {}  # when it last reported each transfer
        # Transfers that it would report and that no request here has (yet), and whether they failed. The connector keeps
        # at most 4096 failures, as many as a scenario has requests.
        self._unmatched: dict[str, bool] = {}

    def land(self, layer: int, copy: Copy, transfer: Transfer, source: str, kind: str) -> None:
        """A batch landed here. What it changes outside this request's own cells is astray."""
        mine = transfer.home is self._ledger
        if mine and not copy.by_unit and transfer.own_blocks_only:
            self._ledger.land(self.tp, layer, transfer.index, copy)
        else:
            self._count_stray(self._ledger.land_astray(self.tp, layer, copy, transfer.index if mine else None), transfer, layer)
        now = self.context.clock.now
        if not transfer.went:
            transfer.landed_ns = now
        self.context.history.rows.append((now, kind, source, self.name, transfer.index, layer, None if mine else ASTRAY))

    def on_write_done(self, transfer_id: Any, transfer: Transfer, writers: int, sender: str) -> None:
        """A prefill rank says that it wrote; complete at once, or when all writers said so."""
        if not isinstance(transfer_id, str):
            return  # the sender refuses to send an id that is no string
        count = self.messages.get(transfer_id, 0) + 1
        wanted = writers if self.me.release.completion == "all_writers" else 1
        self.context.log("write_done", self.name, sender, transfer.index, fields=Counted(wanted))
        if count < wanted:
            self.messages[transfer_id] = count
            return
        self.messages.pop(transfer_id, None)
        if self._reports.mapped(transfer_id) is not None:  # else the rank reports nothing (measured)
            self.context.log("told", self.name, sender, transfer.index)
        self._report(transfer_id, failed=False)

    def on_write_failed(self, transfer_id: Any, transfer: Transfer, sender: str) -> None:
        """A prefill rank says that nothing was or will be written; an older release does not know the message."""
        if self.me.release.write_failed_heard == "unknown":
            self.poison("write_failed is unknown to this release", transfer, sender)
            return
        key = str(transfer_id)
        self.messages.pop(key, None)
        self.context.log("told_failed", self.name, sender, transfer.index)
        self._report(key, failed=True)

    def _report(self, transfer_id: str, failed: bool) -> None:
        """Tell the engine; what the rank hears twice within a step is one report, and what nobody waits for is kept."""
        now = self.context.clock.now
        if now - self._reported_ns.get(transfer_id, -(1 << 62)) < self._step_ns:
            return
        self._reported_ns[transfer_id] = now
        if not self._reports.report(transfer_id, failed):
            self._unmatched[transfer_id] = failed or self._unmatched.get(transfer_id, False)

    def report_kept(self, transfer_id: str, transfer: Transfer) -> None:
        """The request has this transfer from now on: report what came before it."""
        if (failed := self._unmatched.pop(transfer_id, None)) is None:
            return
        if not failed:
            self.context.log("told", self.name, request=transfer.index)
        self._reports.report(transfer_id, failed)

    def look(self, transfer: Transfer, layer: int) -> None:
        """Decode uses this layer now: note what is there."""
        if self.gone:
            return
        count = self._ledger.count(self.tp, layer, transfer.index, transfer.needs[self.tp])
        transfer.used(self.tp, layer, count)
        self._note_short(transfer, layer, count)

    def look_at_all(self, transfer: Transfer) -> None:
        """Decode uses all layers from now on."""
        mine = self.tp, transfer.index, transfer.needs[self.tp]
        count = self._ledger.count_all(*mine)
        transfer.used_all(self.tp, count, self._ledger.count_each(*mine))
        self._note_short(transfer, -1, count)

    def _note_short(self, transfer: Transfer, layer: int, count: Count) -> None:
        if count.covered < count.cells:
            self.context.log("short", self.name, "", transfer.index, layer, Short(count.covered, count.cells))

    def _count_stray(self, cells: int, transfer: Transfer, layer: int) -> None:
        if cells:
            self.context.stray += cells
            self.context.log("stray", self.name, "", transfer.index, layer, Stray(cells))
