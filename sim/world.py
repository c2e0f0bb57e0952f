"""One run: both engines on a simulated network, and a router that sends them the legs of every request."""

from __future__ import annotations

from functools import partial

from kvcover.sim.kernel.events import Lost
from kvcover.sim.moriio.deployment import Deployment
from kvcover.sim.moriio.engine import Engine
from kvcover.sim.moriio.rank_faults import RankFaults
from kvcover.sim.moriio.transfer import Transfer, transfers_of
from kvcover.sim.refusals import refuses
from kvcover.sim.router import RouterAtWork
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.setup import Setup


class World:
    """All state of a run. `run()` plays it to the end; afterwards everything to know is in here."""

    def __init__(self, setup: Setup) -> None:
        self.context = context = Context(setup)
        self.setup, self.mode, self.geometry = setup, context.mode, context.geometry
        self.clock, self.history, self.injector = context.clock, context.history, context.injector
        self.transfers = transfers_of(setup)
        self._deployment = Deployment(context, partial(refuses, setup))
        self.prefills, self.decodes = self._deployment.prefills, self._deployment.decodes
        self.router = RouterAtWork(context, self.transfers, self._deployment)
        self.legs = self.router.legs

    @property
    def fired(self) -> list[int]:
        """How often each planned fault changed something."""
        return self.injector.fired

    @property
    def stray(self) -> int:
        """Cells that batches changed outside of their own requests' blocks."""
        return self.context.stray

    @property
    def engines(self) -> list[Engine]:
        """Every DP rank of both sides."""
        return self._deployment.engines

    def run(self) -> None:
        """Bind all ports, send all requests, and go on until nothing can move any more."""
        RankFaults(self.context, self._deployment, self.transfers, self._died_with_engine).start()
        if self._deployment.all_start():
            self.router.send_all()
        else:
            for transfer in self.transfers:
                self.router.lose(transfer, "crash", Lost("never_started", "an engine never started"))
        self.clock.run()

    def _died_with_engine(self, transfer: Transfer, why: Lost) -> None:
        self.router.lose(transfer, "crash", why)

    def coverage_by_layer(self, request: int = 0) -> list[list[float]]:
        """Coverage when the run is over, shape [TP ranks of the request's decode DP rank][layers]; no rows if never admitted."""
        transfer = self.transfers[request]
        ledger, layers = self.decodes[transfer.decode_dp].ledger, range(self.geometry.layers)
        counts = [[ledger.count(tp, layer, request, need) for layer in layers] for tp, need in enumerate(transfer.needs)]
        return [[count.covered / count.cells for count in row] for row in counts]
