"""One run: both engines on a simulated network, and a router that sends them the legs of every request."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from faults import apply_faults
from sim.clock import Clock
from sim.decode import DecodeEngine
from sim.errors import PeerRefusal
from sim.history import History
from sim.network import Network
from sim.policies import map_fan
from sim.prefill import PrefillEngine
from sim.scenario import Setup
from sim.transfer import Transfer


class World:
    """All state of a run. `run()` plays it to the end; afterwards everything to know is in here."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.mode = setup.scenario.mode
        self.geometry = setup.geometry
        self.fabric = setup.fabric
        self.timing = setup.scenario.timing
        self.clock = Clock(setup.scenario.seed)
        self.history = History()
        self.network = Network(self.clock, self.history, self.timing.message_ns)
        self.stray = 0
        self.fired = [0] * len(setup.faults)
        self.legs: dict[tuple[int, str], dict[str, Any]] = {}
        self.transfers: list[Transfer] = []
        content = 1
        for request in setup.requests:
            self.transfers.append(Transfer(request, content, setup.decode, setup.geometry))
            content += request.blocks
        self.prefills = [PrefillEngine(self, dp) for dp in range(setup.prefill.dp)]
        self.decodes = [DecodeEngine(self, dp) for dp in range(setup.decode.dp)]

    def log(self, kind: str, actor: str, peer: str = "", request: int = -1, layer: int = -1, detail: str = "") -> None:
        """Append to the history at the present instant."""
        self.history.rows.append((self.clock.now, kind, actor, peer, request, layer, detail))

    @property
    def engines(self) -> list[PrefillEngine | DecodeEngine]:
        """Every DP rank of both sides."""
        return [*self.prefills, *self.decodes]

    def run(self) -> None:
        """Bind all ports, send all requests, and go on until nothing can move any more."""
        for engine in self.engines:
            self._bind(engine)
        for transfer in self.transfers:
            self.clock.process(self._route(transfer))
        self.clock.run()

    def _bind(self, engine: PrefillEngine | DecodeEngine) -> None:
        """Ranks bind in order; one whose handshake port is taken never becomes ready, nor does its engine."""
        me, offset = engine.me, engine.me.release.call("ports")
        for rank in engine.ranks:
            port = offset(engine.dp, rank.tp, me.tp)
            if not self.network.bind((me.host, me.handshake_port + port), rank):
                engine.started = False
            self.network.bind((me.host, me.notify_port + port), rank)

    def coverage_by_layer(self, request: int = 0) -> list[list[float]]:
        """Coverage when the run is over, shape [TP ranks of the request's decode DP rank][layers]; no rows if never admitted."""
        transfer = self.transfers[request]
        ledger, layers = self.decodes[transfer.request.decode_dp].ledger, range(self.geometry.layers)
        counts = [[ledger.count(tp, layer, request, need) for layer in layers] for tp, need in enumerate(transfer.needs)]
        return [[count.covered / count.cells for count in row] for row in counts]

    # -- the router -------------------------------------------------------------------------------------------

    def _route(self, transfer: Transfer) -> Generator[Any, None, None]:
        """WRITE: both legs at once. READ: prefill first, then decode with what prefill answered."""
        request, router = transfer.request, self.setup.router
        if request.arrival_ns:
            yield self.clock.timeout(request.arrival_ns)
        values = {
            "transfer_id": transfer.router_id,
            "prefill.tp": self.setup.prefill.tp,
            "prefill.dp": self.setup.prefill.dp,
            "prefill.dp_rank": request.prefill_dp,
            "decode.tp": self.setup.decode.tp,
            "decode.dp": self.setup.decode.dp,
            "decode.dp_rank": request.decode_dp,
        }
        answer = self.clock.event()
        params = self._leave(transfer, "prefill", router.prefill_leg(self.mode, values))
        prefill = self.prefills[request.prefill_dp]
        decode = self.decodes[request.decode_dp]
        self.clock.after(self.timing.message_ns, lambda _event: prefill.submit(transfer, params, answer))
        response = None
        if self.mode == "read":
            response = yield answer
            if response is None and (prefill.crashed or transfer.bad_end):
                transfer.bad_end = transfer.bad_end or "failed"
                return
        decode_params = self._leave(transfer, "decode", router.decode_leg(self.mode, values, response))
        self.clock.after(self.timing.message_ns, lambda _event: decode.submit(transfer, decode_params))

    def _leave(self, transfer: Transfer, leg: str, params: dict[str, Any]) -> dict[str, Any]:
        """A leg's dictionary leaves the router: the point at which key faults act."""
        after, fired = apply_faults(self.setup.faults, params, leg, transfer.index)
        for position in fired:
            self.fired[position] += 1
            self.log("fault_fired", "router", leg, transfer.index, detail=str(self.setup.faults[position]))
        self.legs[transfer.index, leg] = after
        self.log("leg_sent", "router", leg, transfer.index, detail=str(after))
        return after

    # -- refusing (only `reference` does) ---------------------------------------------------------------------

    def refuses(self) -> str:
        """Why a correct connector would refuse this pair of engines before anything moves; empty if it would not."""
        try:
            map_fan(0, self.setup.prefill.tp, self.setup.decode.tp, self.geometry)
        except PeerRefusal as refusal:
            return refusal.text
        return ""

    def refuse(self, transfer: Transfer, engine: str, text: str) -> None:
        transfer.bad_end = "refused"
        transfer.ended = True
        self.log("refused", engine, request=transfer.index, detail=text)
