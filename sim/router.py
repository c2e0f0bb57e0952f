"""The router: every request at its arrival, the legs as they leave, and what the client is told when none does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvcover.faults import Fault
from kvcover.sim.kernel.clock import ns
from kvcover.sim.kernel.events import FaultActed, LegSent, Lost
from kvcover.sim.moriio.deployment import Deployment
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.dispatch import Dispatch, Params, values_of


class RouterAtWork:
    """Sends requests to the engines of a deployment. `legs`: what it sent, by request and side.

    `handed` is what the engine of a side is given of a leg: the leg itself, unless somebody wants to see what is read of it.
    """

    def __init__(self, context: Context, transfers: Sequence[Transfer], deployment: Deployment) -> None:
        self.context = context
        self.legs: dict[tuple[int, str], dict[str, Any]] = {}
        self.handed: Callable[[str, Params], Params] = lambda _side, params: params
        self._transfers = transfers
        self._deployment = deployment

    def send_all(self) -> None:
        """Every request at its arrival, and no more at a time than the workload allows."""
        limit = self.context.setup.scenario.workload.concurrency or len(self._transfers)
        waiting = deque(self._transfers)

        def next_one() -> None:
            if waiting:
                transfer = waiting.popleft()
                transfer.on_finish = next_one
                self.context.clock.process(self._route(transfer))

        for _ in range(min(limit, len(self._transfers))):
            next_one()

    def lose(self, transfer: Transfer, bad_end: str, why: Lost) -> None:
        """The router answers the client with an error; `bad_end` unless the request has come to one before."""
        transfer.bad_end = transfer.bad_end or bad_end
        self.context.log("lost", "router", request=transfer.index, fields=why)
        transfer.finish()

    def dispatch(self, transfer: Transfer) -> Dispatch:
        """What writes the legs of a request."""
        context, request = self.context, transfer.request
        values = values_of(context.setup, request, transfer.router_id)
        router, plain = context.setup.router, request.plain
        return Dispatch(router, context.mode, values, context.injector, transfer.index, plain, context.now_ms)

    def _route(self, transfer: Transfer) -> Generator[Any, None, None]:
        """WRITE: both legs at once. READ: prefill first, then decode with what prefill answered."""
        clock, request = self.context.clock, transfer.request
        if request.arrival_ns > clock.now:
            yield clock.timeout(request.arrival_ns - clock.now)
        transfer.started_ns = clock.now
        if self._forgotten(transfer):
            return
        answer = clock.event()
        dispatch = self.dispatch(transfer)
        transfer.ports_off = dispatch.ports_off()
        unsent = self._send_leg(transfer, "prefill", dispatch.prefill_leg(), answer)
        response: dict[str, Any] | None = None
        if self.context.mode == "read":
            if not unsent:
                response = yield answer
            if response is None:
                self.lose(transfer, "failed" if unsent else "crash", unsent or Lost("no_answer", "prefill gave no answer"))
                return
        if unsent := self._send_leg(transfer, "decode", dispatch.decode_leg(response), None):
            self.lose(transfer, "failed", unsent)

    def _forgotten(self, transfer: Transfer) -> bool:
        """Whether the router has lost an instance by now, and knows no other: its heartbeats stopped and its registration ran out.

        Of several instances it is the first, and its requests go to the next one.
        """
        expiry_s = self.context.setup.router.registration_expiry_s
        for fault in self.context.injector.planned("stop-heartbeat"):
            if expiry_s is not None and self.context.clock.now > ns(fault.ms) + expiry_s * 1e9:
                me = self.context.setup.prefill if fault.target == "prefill" else self.context.setup.decode
                if me.side.instances > 1 and me.instance(transfer.chosen(fault.target)) > 0:
                    continue
                self.context.injector.note(fault)
                if me.side.instances > 1:
                    self.context.log("redirected", "router", fault.target, transfer.index)
                    transfer.redirect(fault.target, transfer.chosen(fault.target) + me.dp)
                    continue
                self.context.log("forgotten", "router", fault.target, transfer.index)
                transfer.bad_end = "failed"
                transfer.finish()
                return True
        return False

    def _send_leg(self, transfer: Transfer, side: str, leg: tuple[Params, list[Fault]], answer: Any) -> Lost | None:
        """Send one leg, which key faults have changed, through the router's own; returns why no engine gets it, if none does."""
        context, request, engines = self.context, transfer.request, self._deployment.side(side)
        params = self.handed(side, self._leave(transfer, side, *leg))
        me, rejected = engines[0].me, side == "decode" and request.rejected
        dp, delay = (request.prefill_dp if side == "prefill" else request.decode_dp), 0
        for fault in context.injector.acting("router", side, request=transfer.index, now_ms=context.now_ms):
            self.context.log("fault_fired", "router", side, transfer.index, fields=FaultActed(str(fault), "router"))
            if fault.kind == "fail-leg":
                return Lost("unsent", "a leg could not be sent")
            if fault.kind == "delay-leg":
                delay += ns(fault.ms)
            elif fault.kind == "wrong-dp":
                dp -= me.own_dp(dp)
                dp += (fault.dp or 0) % me.dp
                rejected = False
        if rejected:
            asked = context.setup.prefill.own_dp(request.prefill_dp)
            text = f"decode has no DP rank {asked}, which the router asks for, and rejects the request"
            return Lost("rejected", text)
        if engines[dp].gone:
            self.context.log("unreachable", "router", side, transfer.index)
            return Lost("down", f"{side} is down")
        context.clock.after(context.timing.message_ns + delay, lambda _event: self._arrive(transfer, side, dp, params, answer))
        return None

    def _leave(self, transfer: Transfer, leg: str, params: Params, fired: list[Fault]) -> Params:
        """A leg's dictionary leaves the router."""
        for fault in fired:
            self.context.log("fault_fired", "router", leg, transfer.index, fields=FaultActed(str(fault), "params"))
        self.legs[transfer.index, leg] = params
        self.context.log("leg_sent", "router", leg, transfer.index, fields=LegSent(params))
        return params

    def _arrive(self, transfer: Transfer, side: str, dp: int, params: Params, answer: Any) -> None:
        """A leg reaches the engine that is there by now; one that left late may find another, or none."""
        engine = self._deployment.side(side)[dp]
        if not engine.gone:
            engine.submit(transfer, params, answer)
            return
        self.context.log("unreachable", "router", side, transfer.index)
        if side == "prefill":
            answer.succeed(None)
        else:
            self.lose(transfer, "failed", Lost("down", "decode is down"))
