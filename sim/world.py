"""One run: both engines on a simulated network, and a router that sends them the legs of every request."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcover.faults import EventFault, Fault, Injector
from kvcover.sim.cache.geometry import check_slices
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.clock import Clock
from kvcover.sim.kernel.events import FaultFired, Fields, LegSent, Lost, Raised, Why
from kvcover.sim.kernel.history import History
from kvcover.sim.kernel.network import MS, Network
from kvcover.sim.moriio.decode import DecodeEngine
from kvcover.sim.moriio.prefill import PrefillEngine
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.moriio.writer import BROKEN, NEVER
from kvcover.sim.releases.maps import map_fan
from kvcover.sim.scenario.dispatch import Dispatch, Params
from kvcover.sim.scenario.setup import Endpoint, Request, Setup

if TYPE_CHECKING:
    from kvcover.sim.moriio.decode import DecodeRank
    from kvcover.sim.moriio.prefill import PrefillRank


_RETRIES_NS = 470_000_000
"""Seven retries of 4.096 µs × 2^14, the defaults that mori#670 names."""


class TransferEffect(NamedTuple):
    """What becomes of one batch: bytes land at `land_at` (None: never), MoRI says it is over at `done_at`, with `error`.

    `refused`: the post itself fails. `fraction` of the bytes land.
    """

    land_at: int | None
    done_at: int
    error: str = ""
    refused: str = ""
    fraction: float = 1.0


class World:
    """All state of a run. `run()` plays it to the end; afterwards everything to know is in here."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.mode: str = setup.scenario.mode
        self.geometry = setup.geometry
        self.fabric = setup.fabric
        self.timing = setup.scenario.timing
        self.clock = Clock(setup.scenario.seed)
        self.history = History()
        self.injector = Injector(setup.faults)
        self.network = Network(self.clock, self.history, self.timing.message_ns, self.injector)
        self.stray = 0
        self._late_binds: Counter[str] = Counter()  # ports of late ranks that are yet to be bound, by engine
        self.legs: dict[tuple[int, str], dict[str, Any]] = {}
        self.transfers: list[Transfer] = []
        token, step = 0, math.lcm(setup.prefill.shape.block_size, setup.decode.shape.block_size)
        for request in setup.requests:
            self.transfers.append(Transfer(request, token, setup.prefill, setup.decode))
            token += -(-request.prompt_tokens // step) * step
        self.prefills = [PrefillEngine(self, dp) for dp in range(setup.prefill.dp)]
        self.decodes = [DecodeEngine(self, dp) for dp in range(setup.decode.dp)]
        self._scheduled = {
            (fault.kind, int(fault.target)): fault
            for kind in ("abort", "preempt", "stop-at-prefill")
            for fault in self.injector.planned(kind)
        }
        self._steps_delayed = self.injector.plans("schedule")

    @property
    def fired(self) -> list[int]:
        """How often each planned fault changed something."""
        return self.injector.fired

    def log(self, kind: str, actor: str, peer: str = "", request: int = -1, layer: int = -1, fields: Fields | None = None) -> None:
        """Append to the history at the present instant."""
        self.history.rows.append((self.clock.now, kind, actor, peer, request, layer, fields))

    @property
    def engines(self) -> list[PrefillEngine | DecodeEngine]:
        """Every DP rank of both sides."""
        return [*self.prefills, *self.decodes]

    def block_count(self, request: Request, endpoint: Endpoint) -> int:
        """Blocks that an engine allocates for a request: its prompt and the engine's lookahead, in all block tables."""
        return sum(count - skipped for skipped, count in endpoint.rows(request.prompt_tokens))

    def run(self) -> None:
        """Bind all ports, send all requests, and go on until nothing can move any more."""
        late = {fault.target: fault for fault in self.injector.planned("late-rank")}
        for engine in self.engines:
            for rank in engine.ranks * engine.me.stages:
                if (fault := late.get(rank.name)) is None:
                    self._bind(engine, rank)
                else:
                    self.injector.note(fault)
                    engine.started = False
                    self._late_binds[engine.name] += 1
                    self.clock.after(_ns(fault.ms), lambda _event, e=engine, r=rank: self._bind_late(e, r))  # type: ignore[misc]
        self._plan_ranks()
        if self._all_start():
            self._send_all()
        self.clock.run()

    def _all_start(self) -> bool:
        """Whether every engine's connector takes its cache; one that does not start is known to no router."""
        refused = [(engine, why) for engine in self.engines if (why := engine.me.start_error(self.mode))]
        for engine, why in refused:
            engine.crash(Raised.by(why), None)
        for transfer in self.transfers if refused else ():
            transfer.bad_end = "crash"
            self._lose(transfer, Lost("never_started", "an engine never started"))
        return not refused

    def _bind(self, engine: PrefillEngine | DecodeEngine, rank: PrefillRank | DecodeRank) -> None:
        """Ranks bind in order; one whose handshake port is taken never becomes ready, nor does its engine."""
        me = engine.me
        dp = engine.dp % me.local_dp if me.release.pod_ports == "in_pod" else engine.dp
        port = me.release.call("ports")(dp, rank.tp, me.tp)
        host = me.hosts[me.pod(engine.dp)]
        if not self.network.bind((host, me.handshake_port + port), rank):
            # It waits for its listener for ever, and the other DP ranks of the deployment wait for it.
            for other in self.prefills if engine in self.prefills else self.decodes:
                other.started = False
        self.network.bind((host, me.notify_port + port), rank)

    def _bind_late(self, engine: PrefillEngine | DecodeEngine, rank: PrefillRank | DecodeRank) -> None:
        """The engine starts with the last of its late ranks, if no rank of the deployment found its port taken."""
        self._bind(engine, rank)
        self._late_binds[engine.name] -= 1
        failed = any(event.actor.startswith(engine.me.letter) for event in self.history.events("bind_failed"))
        if not self._late_binds[engine.name] and not failed:
            engine.start()

    def _plan_ranks(self) -> None:
        """Faults that are set up before the run: crashes, stalls, slow NICs."""
        ranks = {rank.name: (engine, rank) for engine in self.engines for rank in engine.ranks}
        for fault in self.injector.planned("slow-nic"):
            ranks[fault.target][1].nic.slowdown = fault.factor or 1.0
            self.injector.note(fault)
        for fault in self.injector.planned("stall-rank"):
            start = _ns(fault.ms)
            ranks[fault.target][1].stalls.append((start, start + _ns(fault.for_ms)))
            self.clock.after(start, lambda _event, f=fault: None if self._over() else self.injector.note(f))  # type: ignore[misc]
        for fault in (*self.injector.planned("crash-rank"), *self.injector.planned("restart-rank")):
            self.clock.after(_ns(fault.ms), lambda _event, f=fault: self._crash(f))  # type: ignore[misc]

    def _crash(self, fault: EventFault) -> None:
        """A rank's process dies, and its engine with it; for some faults it comes back."""
        engine, rank = next((engine, rank) for engine in self.engines for rank in engine.ranks if rank.name == fault.target)
        if self._over() or engine.crashed:
            return
        self.injector.note(fault)
        rank.deaf = True
        engine.crash(Raised("", f"rank {rank.name} died", fault=str(fault)), None, rank.name)
        if fault.kind == "restart-rank":
            for index in engine.die():
                self._cut_off(self.transfers[index], engine)
            for other in engine.ranks:
                self.network.free(other)
            self.clock.after(_ns(fault.for_ms), lambda _event: self._restart(engine))

    def _cut_off(self, transfer: Transfer, engine: PrefillEngine | DecodeEngine) -> None:
        """The engine died with the request in it. Decode's client hears of it; prefill's part may be over."""
        if isinstance(engine, PrefillEngine):
            if not transfer.went:
                transfer.bad_end = "crash"
        elif not transfer.ended:
            transfer.bad_end = "crash"
            self._lose(transfer, Lost("died", f"{engine.name} died with it"))

    def _restart(self, before: PrefillEngine | DecodeEngine) -> None:
        """The engine is back: ports and names as before, and nothing in its memory."""
        engine: PrefillEngine | DecodeEngine
        if isinstance(before, PrefillEngine):
            engine = self.prefills[before.dp] = PrefillEngine(self, before.dp)
        else:
            engine = self.decodes[before.dp] = DecodeEngine(self, before.dp)
        self.log("restarted", engine.name)
        for rank in engine.ranks:
            self._bind(engine, rank)

    def broken_session(self) -> TransferEffect:
        """What becomes of a batch to a process that is gone: nothing lands, and the NIC gives up after its retries."""
        after_ns = 0 if self.fabric.name == "loopback" else _RETRIES_NS
        return TransferEffect(None, self.clock.now + after_ns, BROKEN)

    def _over(self) -> bool:
        """Whether every request has ended and nobody holds blocks for one: then a rank's fault does nothing more."""
        return all(transfer.ended for transfer in self.transfers) and not any(engine.pool.held for engine in self.engines)

    # -- planned faults ---------------------------------------------------------------------------------------

    def planned_for(self, kind: str, transfer: Transfer) -> bool:
        """Whether a scheduling fault of this kind aims at the request; it counts as fired."""
        fault = self._scheduled.get((kind, transfer.index))
        if fault is not None:
            self.injector.note(fault)
        return fault is not None

    def planned_abort(self, transfer: Transfer) -> EventFault | None:
        """The abort planned for the request; it fires when the engine acts on it."""
        return self._scheduled.get(("abort", transfer.index))

    def step_delay(self, side: str) -> int:
        """How long a step of an engine is held up (ns)."""
        if not self._steps_delayed:
            return 0
        return sum(_ns(f.ms) for f in self.injector.acting("schedule", side, now_ms=self.clock.now / MS) if f.kind == "delay-step")

    def transfer_effect(self, op: str, sender: str, receiver: str, request: int, layer: int, land: int) -> TransferEffect:
        """What planned faults make of a batch that would land at `land` (ns)."""
        effect = TransferEffect(land, land)
        for fault in self.injector.acting("transfer", op, sender, receiver, request, layer, self.clock.now / MS):
            self.log("fault_fired", sender, receiver, request, layer, FaultFired(str(fault), "transfer"))
            later, error = land + _ns(fault.ms), fault.status or "ERR_RDMA_OP"
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

    def coverage_by_layer(self, request: int = 0) -> list[list[float]]:
        """Coverage when the run is over, shape [TP ranks of the request's decode DP rank][layers]; no rows if never admitted."""
        transfer = self.transfers[request]
        ledger, layers = self.decodes[transfer.decode_dp].ledger, range(self.geometry.layers)
        counts = [[ledger.count(tp, layer, request, need) for layer in layers] for tp, need in enumerate(transfer.needs)]
        return [[count.covered / count.cells for count in row] for row in counts]

    # -- the router -------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Every request at its arrival, and no more at a time than the workload allows."""
        limit = self.setup.scenario.workload.concurrency or len(self.transfers)
        waiting = deque(self.transfers)

        def next_one() -> None:
            if waiting:
                transfer = waiting.popleft()
                transfer.on_finish = next_one
                self.clock.process(self._route(transfer))

        for _ in range(min(limit, len(self.transfers))):
            next_one()

    def _route(self, transfer: Transfer) -> Generator[Any, None, None]:
        """WRITE: both legs at once. READ: prefill first, then decode with what prefill answered."""
        request = transfer.request
        if request.arrival_ns > self.clock.now:
            yield self.clock.timeout(request.arrival_ns - self.clock.now)
        transfer.started_ns = self.clock.now
        if self._forgotten(transfer):
            return
        answer = self.clock.event()
        dispatch = self.dispatch(transfer)
        transfer.ports_off = dispatch.ports_off()
        unsent = self._send_leg(transfer, "prefill", dispatch.prefill_leg(), answer)
        response: dict[str, Any] | None = None
        if self.mode == "read":
            if not unsent:
                response = yield answer
            if response is None:
                transfer.bad_end = transfer.bad_end or ("failed" if unsent else "crash")
                self._lose(transfer, unsent or Lost("no_answer", "prefill gave no answer"))
                return
        if unsent := self._send_leg(transfer, "decode", dispatch.decode_leg(response), None):
            transfer.bad_end = transfer.bad_end or "failed"
            self._lose(transfer, unsent)

    def dispatch(self, transfer: Transfer) -> Dispatch:
        """What writes the legs of a request."""
        plain, now_ms = transfer.request.plain, self.clock.now / MS
        return Dispatch(self.setup.router, self.mode, self._values(transfer), self.injector, transfer.index, plain, now_ms)

    def named_ports(self, transfer: Transfer, peer: Endpoint) -> tuple[int, int] | None:
        """Handshake and notify base port of an instance as the request's id names them; None if ids name none."""
        if not self.setup.scenario.request_id_addresses:
            return None
        off = transfer.ports_off["prefill" if peer is self.setup.prefill else "decode"]
        return peer.handshake_port + off, peer.notify_port + off

    def _lose(self, transfer: Transfer, why: Lost) -> None:
        """The router answers the client with an error."""
        self.log("lost", "router", request=transfer.index, fields=why)
        transfer.finish()

    def _values(self, transfer: Transfer) -> dict[str, Any]:
        """What the `$` names of a router's templates stand for."""
        request, prefill, decode = transfer.request, self.setup.prefill, self.setup.decode
        return {
            "transfer_id": transfer.router_id,
            "prefill.tp": prefill.tp,
            "prefill.dp": prefill.dp,
            "prefill.dp_rank": request.prefill_dp,
            "prefill.dp_local": prefill.local_dp,
            "prefill.hosts": list(prefill.hosts),
            "decode.tp": decode.tp,
            "decode.dp": decode.dp,
            "decode.dp_rank": request.decode_dp,
            "decode.dp_local": decode.local_dp,
            "decode.hosts": list(decode.hosts),
        }

    def _send_leg(self, transfer: Transfer, side: str, leg: tuple[Params, list[Fault]], answer: Any) -> Lost | None:
        """Send one leg, which key faults have changed, through the router's own; returns why no engine gets it, if none does."""
        params, request = self._leave(transfer, side, *leg), transfer.request
        rejected = side == "decode" and request.rejected
        dp, delay = (request.prefill_dp if side == "prefill" else request.decode_dp), 0
        for fault in self.injector.acting("router", side, request=transfer.index, now_ms=self.clock.now / MS):
            self.log("fault_fired", "router", side, transfer.index, fields=FaultFired(str(fault), "router"))
            if fault.kind == "fail-leg":
                return Lost("unsent", "a leg could not be sent")
            if fault.kind == "delay-leg":
                delay += _ns(fault.ms)
            elif fault.kind == "wrong-dp":
                dp = (fault.dp or 0) % len(self.prefills if side == "prefill" else self.decodes)
                rejected = False
        if rejected:
            text = f"decode has no DP rank {request.prefill_dp}, which the router asks for, and rejects the request"
            return Lost("rejected", text)
        if any(rank.gone for rank in (self.prefills if side == "prefill" else self.decodes)[dp].ranks):
            self.log("unreachable", "router", side, transfer.index)
            return Lost("down", f"{side} is down")
        self.clock.after(self.timing.message_ns + delay, lambda _event: self._arrive(transfer, side, dp, params, answer))
        return None

    def _arrive(self, transfer: Transfer, side: str, dp: int, params: Params, answer: Any) -> None:
        """A leg reaches the engine that is there by now; one that left late may find another, or none."""
        engine = (self.prefills if side == "prefill" else self.decodes)[dp]
        if any(rank.gone for rank in engine.ranks):
            self.log("unreachable", "router", side, transfer.index)
            if side == "prefill":
                answer.succeed(None)
            else:
                transfer.bad_end = transfer.bad_end or "failed"
                self._lose(transfer, Lost("down", "decode is down"))
        elif isinstance(engine, PrefillEngine):
            engine.submit(transfer, params, answer)
        else:
            engine.submit(transfer, params)

    def _forgotten(self, transfer: Transfer) -> bool:
        """Whether the router has lost an instance by now: its heartbeats stopped and its registration ran out."""
        expiry_s = self.setup.router.registration_expiry_s
        for fault in self.injector.planned("stop-heartbeat"):
            if expiry_s is not None and self.clock.now > _ns(fault.ms) + expiry_s * 1e9:
                self.injector.note(fault)
                self.log("forgotten", "router", fault.target, transfer.index)
                transfer.bad_end = "failed"
                transfer.finish()
                return True
        return False

    def _leave(self, transfer: Transfer, leg: str, params: Params, fired: list[Fault]) -> Params:
        """A leg's dictionary leaves the router."""
        for fault in fired:
            self.log("fault_fired", "router", leg, transfer.index, fields=FaultFired(str(fault), "params"))
        self.legs[transfer.index, leg] = params
        self.log("leg_sent", "router", leg, transfer.index, fields=LegSent(params))
        return params

    # -- refusing (only `reference` does) ---------------------------------------------------------------------

    def refuses(self) -> str:
        """Why a correct connector would refuse this pair of engines before anything moves; empty if it would not."""
        if max(self.setup.prefill.side.pp, self.setup.decode.side.pp) > 1:
            return "pipeline parallelism"
        if self.geometry.mixed and self.setup.prefill.tp != self.setup.decode.tp:
            return "layers of two kinds under unequal tensor parallel sizes"
        if self.geometry.has_states:
            if why := self.setup.prefill.state_error(self.mode) or self.setup.decode.state_error(self.mode):
                return str(why)
            if self.mode == "read" and self.setup.prefill.tp != self.setup.decode.tp:
                return "READ of recurrent states under unequal tensor parallel sizes"
        tables = (*self.setup.prefill.tables, *self.setup.decode.tables)
        if self.mode == "write" and any(table.window for table in tables):
            return "sliding-window block tables in WRITE"
        if [table.window for table in self.setup.prefill.tables] != [table.window for table in self.setup.decode.tables]:
            return "one engine has block tables of its own for sliding windows, the other has not"
        try:
            map_fan(0, self.setup.prefill.tp, self.setup.decode.tp, self.geometry)
            check_slices(self.setup.prefill.shape, self.setup.decode.shape)
        except PeerRefusal as refusal:
            return refusal.text
        here, there = self.setup.prefill.shape.kv_dtype, self.setup.decode.shape.kv_dtype
        return f"prefill's KV is {here}, decode's {there}" if here != there else ""

    def refuse(self, transfer: Transfer, engine: str, text: str) -> None:
        """An engine refused the request; nothing moved."""
        transfer.bad_end = "refused"
        transfer.finish()
        self.log("refused", engine, request=transfer.index, fields=Why(text))


def _ns(ms: float | None) -> int:
    return round((ms or 0.0) * MS)
