"""What planned faults make of a batch and of a scheduler's step."""

from __future__ import annotations

from typing import NamedTuple

from kvcover.faults import EventFault
from kvcover.sim.kernel.clock import NEVER, ns
from kvcover.sim.kernel.events import FaultActed
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context

BROKEN = "transport retry counter exceeded"
"""The error of a batch to a process that is no longer there."""
_RETRIES_NS = 536_870_912
"""A try and seven more of 4.096 µs × 2^14, mori's defaults: "~537ms" in the library's own words, which the stand-in takes too."""


class TransferEffect(NamedTuple):
    """What becomes of one batch: bytes land at `land_at` (None: never), MoRI says it is over at `done_at`, with `error`.

    `refused`: the post itself fails. `fraction` of the bytes land.
    """

    land_at: int | None
    done_at: int
    error: str = ""
    refused: str = ""
    fraction: float = 1.0


def broken_session(context: Context) -> TransferEffect:
    """What becomes of a batch to a process that is gone: nothing lands, and the NIC gives up after its retries."""
    return TransferEffect(None, context.clock.now + _RETRIES_NS, BROKEN)


def transfer_effect(context: Context, op: str, sender: str, receiver: str, request: int, layer: int, land: int) -> TransferEffect:
    """What planned faults make of a batch that would land at `land` (ns)."""
    effect = TransferEffect(land, land)
    for fault in context.injector.acting("transfer", op, sender, receiver, request, layer, context.now_ms):
        context.log("fault_fired", sender, receiver, request, layer, FaultActed(str(fault), "transfer"))
        later, error = land + ns(fault.ms), fault.status or "ERR_RDMA_OP"
        if fault.kind == "fail-transfer":
            effect = TransferEffect(None, land, error)
        elif fault.kind == "partial-transfer":
            effect = TransferEffect(land, land, error, fraction=fault.fraction or 0.5)
        elif fault.kind == "delay-transfer":
            effect = TransferEffect(later, later)
        elif fault.kind == "late-transfer":
            effect = TransferEffect(later, land, error)
        elif fault.kind == "lose-completion":
            effect = TransferEffect(land, NEVER)
        elif fault.kind == "early-completion":
            effect = TransferEffect(later, land)
        elif fault.kind == "sq-full":
            effect = TransferEffect(land, land, refused="SQ full")
    return effect


class ScheduleFaults:
    """What planned faults do to one scheduler: to a request when its turn has come, and to a step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_request = {
            (fault.kind, int(fault.target)): fault
            for kind in ("abort", "preempt", "stop-at-prefill")
            for fault in context.injector.planned(kind)
        }
        self._steps_delayed = context.injector.plans("schedule")

    def hits(self, kind: str, transfer: Transfer) -> bool:
        """Whether a fault of this kind aims at the request; it counts as fired."""
        fault = self._by_request.get((kind, transfer.index))
        if fault is not None:
            self._context.injector.note(fault)
        return fault is not None

    def abort(self, transfer: Transfer) -> EventFault | None:
        """The abort planned for the request; it fires when the engine acts on it."""
        return self._by_request.get(("abort", transfer.index))

    def step_delay(self, side: str) -> int:
        """How long a step of an engine is held up (ns)."""
        if not self._steps_delayed:
            return 0
        acting = self._context.injector.acting("schedule", side, now_ms=self._context.now_ms)
        return sum(ns(fault.ms) for fault in acting if fault.kind == "delay-step")
