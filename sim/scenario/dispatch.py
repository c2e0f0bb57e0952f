"""One request at the router: both legs as it writes them, and as they leave after the faults of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcover.faults import EventFault, Fault, Injector
from kvcover.sim.scenario.endpoint import Request
from kvcover.sim.scenario.routers import Router
from kvcover.sim.scenario.setup import Setup

Params = dict[str, Any]


class Dispatch:
    """Writes the legs of one request. `values` are what the `$` names of the router's templates stand for.

    `plain`: a request that is not split, whose legs say nothing. `now_ms`: when the router picks the instances, and so what
    it knows of them.
    """

    def __init__(
        self,
        router: Router,
        mode: str,
        values: Mapping[str, Any],
        injector: Injector,
        request: int,
        plain: bool = False,
        now_ms: float = 0.0,
    ) -> None:
        self._router, self._mode, self._plain = router, mode, plain
        self._injector, self._request = injector, request
        old = [fault for fault in injector.planned("stale-registration") if fault.for_ms is None or now_ms < fault.for_ms]
        self._old = [(fault, former(fault, values)) for fault in old]
        self._values = values

    def prefill_leg(self) -> tuple[Params, list[Fault]]:
        """The prefill leg's params as they leave, and the faults that changed them."""
        return self._leave("prefill", None, self.written("decode"))

    def decode_leg(self, response: Mapping[str, Any] | None) -> tuple[Params, list[Fault]]:
        """The decode leg's; in READ `response` is what the prefill engine answered."""
        return self._leave("decode", response, self.written("prefill"))

    def ports_off(self) -> dict[str, int]:
        """By how much the ports of each side, as request ids name them, are off."""
        off = {"prefill": 0, "decode": 0}
        for fault, _ in self._old:
            if fault.port:
                self._injector.note(fault)
                off[fault.target] += fault.port
        return off

    def written(self, leg: str, response: Mapping[str, Any] | None = None, known: int | None = None) -> Params:
        """A leg as the router writes it, before any fault of keys; `known` counts the out-of-date registrations that it uses."""
        values = dict(self._values)
        for _, numbers in self._old[:known]:
            values |= numbers
        if self._plain:
            return {}
        if leg == "prefill":
            return self._router.prefill_leg(self._mode, values)
        return self._router.decode_leg(self._mode, values, response)

    def _leave(self, leg: str, response: Mapping[str, Any] | None, other: Params) -> tuple[Params, list[Fault]]:
        """A leg through all faults, each of which counts if it changed something."""
        fired: list[Fault] = []
        for count, (fault, _) in enumerate(self._old):
            if self.written(leg, response, count) != self.written(leg, response, count + 1):
                self._injector.note(fault)
                fired.append(fault)
        params, changed = self._injector.params(self.written(leg, response), leg, self._request, other)
        return params, fired + changed


def values_of(setup: Setup, request: Request, transfer_id: str) -> dict[str, Any]:
    """What the `$` names of a router's templates (`routers.NAMES`) stand for."""
    prefill, decode = setup.prefill, setup.decode
    return {
        "transfer_id": transfer_id,
        "prefill.tp": prefill.tp,
        "prefill.dp": prefill.dp,
        "prefill.dp_rank": prefill.own_dp(request.prefill_dp),
        "prefill.dp_local": prefill.local_dp,
        "prefill.hosts": list(prefill.hosts_of(request.prefill_dp)),
        "decode.tp": decode.tp,
        "decode.dp": decode.dp,
        "decode.dp_rank": decode.own_dp(request.decode_dp),
        "decode.dp_local": decode.local_dp,
        "decode.hosts": list(decode.hosts_of(request.decode_dp)),
    }


def former(fault: EventFault, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that an instance's former registration stands for."""
    side, numbers = fault.target, {}
    if fault.tp is not None:
        numbers[f"{side}.tp"] = fault.tp
    if fault.dp is not None:
        numbers |= {f"{side}.dp": fault.dp, f"{side}.dp_local": max(1, fault.dp // len(values[f"{side}.hosts"]))}
    return numbers
