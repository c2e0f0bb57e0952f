"""A simulated address space: listeners on ports that are really bound, senders that never learn if nobody is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcover.faults import EventFault, Injector
from kvcover.sim.kernel.clock import MS, Clock
from kvcover.sim.kernel.events import FaultActed, Listener, Message
from kvcover.sim.kernel.history import History

Address = tuple[str, int]
Deliver = Callable[[Any], None]


class Network:
    """Ports of all hosts. Like ZMQ without high-water marks, a send to a port that nobody bound succeeds and waits there."""

    def __init__(self, clock: Clock, history: History, latency_ns: int, injector: Injector) -> None:
        self.clock = clock
        self.history = history
        self.latency_ns = latency_ns
        self._injector = injector
        self._noticed = injector.plans("notice")
        self._bound: dict[Address, Any] = {}
        self._next_free: dict[tuple[str, Address], int] = {}
        self._waiting: dict[Address, list[Callable[[], None]]] = {}
        self._spikes: list[tuple[EventFault, float]] = [(fault, fault.factor or 1.0) for fault in injector.planned("latency-spike")]
        self._partitions = injector.planned("partition")

    def bind(self, address: Address, owner: Any) -> bool:
        """Bind `owner` (a rank) to the port; False when another rank has it. What waited for the port arrives now."""
        taken = address in self._bound
        if taken:
            other = self._bound[address].name
            self.history.add(self.clock.now, "bind_failed", owner.name, other, fields=Listener(*address))
            return False
        self._bound[address] = owner
        self.history.add(self.clock.now, "bound", owner.name, fields=Listener(*address))
        for arrive in self._waiting.pop(address, ()):
            arrive()
        return True

    def free(self, owner: Any) -> None:
        """A rank's process ended: its ports are free, and what is sent to them from now on waits for who binds them next."""
        self._bound = {address: rank for address, rank in self._bound.items() if rank is not owner}

    def owner(self, address: Address) -> Any | None:
        """Who bound the port, or None."""
        return self._bound.get(address)

    def when_bound(self, address: Address, action: Callable[[], None]) -> None:
        """Call `action` when somebody binds the port."""
        self._waiting.setdefault(address, []).append(action)

    def send(self, sender: str, address: Address, request: int, what: str, deliver: Deliver) -> None:
        """Call `deliver(owner)` after the latency; messages of one sender to one port arrive in order."""
        if self._noticed:
            self._send_faulted(sender, address, request, what, deliver)
        else:
            self._send(sender, address, request, what, deliver, 0)

    def _send(
        self, sender: str, address: Address, request: int, what: str, deliver: Deliver, extra_ns: int, in_order: bool = True
    ) -> None:
        owner = self._bound.get(address)
        now = self.clock.now
        if owner is None:
            self.history.add(now, "undelivered", sender, request=request, fields=Message(what, *address))
            self.when_bound(address, lambda: self._send(sender, address, request, what, deliver, extra_ns, in_order))
            return
        arrival = now + self._latency(sender, owner.name, now) + extra_ns
        if in_order:
            # Strictly increasing arrival times keep one socket in order although the seed breaks ties.
            socket = (sender, address)
            arrival = max(arrival, self._next_free.get(socket, 0))
            self._next_free[socket] = arrival + 1
        self.clock.after(arrival - now, lambda _event: self._arrive(sender, owner, request, what, deliver))

    def _arrive(self, sender: str, owner: Any, request: int, what: str, deliver: Deliver) -> None:
        now = self.clock.now
        moves_at = owner.stalled_until(now)
        if owner.deaf:
            self.history.add(now, "undelivered", sender, owner.name, request, fields=Message(what))
        elif moves_at > now:
            self.clock.after(moves_at - now, lambda _event: self._arrive(sender, owner, request, what, deliver))
        else:
            deliver(owner)

    def _latency(self, sender: str, receiver: str, now: int) -> int:
        latency = self.latency_ns
        for fault, factor in self._spikes:
            if fault.target in (sender, receiver) and _during(fault, now):
                self._injector.note(fault)
                latency = round(latency * factor)
        for fault in self._partitions:
            if fault.target in (sender, receiver) and _during(fault, now):
                self._injector.note(fault)
                latency += round(((fault.ms or 0) + (fault.for_ms or 0)) * MS) - now  # TCP delivers when the path is back
        return latency

    def _send_faulted(self, sender: str, address: Address, request: int, what: str, deliver: Deliver) -> None:
        """A control message leaves a socket: the point at which notice faults act."""
        owner = self._bound.get(address)
        receiver = owner.name if owner else ""
        copies, extra_ns, in_order = 1, 0, True
        for fault in self._injector.acting("notice", what, sender, receiver, request, now_ms=self.clock.now / MS):
            self.history.add(self.clock.now, "fault_fired", sender, receiver, request, fields=FaultActed(str(fault), "notice"))
            again_ns = round((fault.ms or 0.0) * MS)
            if fault.kind == "drop-notice":
                copies = 0
            elif fault.kind in ("duplicate-notice", "replay-notice"):
                self._send(sender, address, request, what, deliver, again_ns, in_order=False)
            elif fault.kind in ("delay-notice", "reorder-notice"):
                extra_ns, in_order = again_ns, fault.kind == "delay-notice"
            elif fault.kind == "misroute-notice":
                address = (address[0], address[1] + (fault.port or 0))
            elif fault.kind == "poison-notice":
                deliver = _poison(what, sender)
        for _ in range(copies):
            self._send(sender, address, request, what, deliver, extra_ns, in_order)


def _during(fault: EventFault, now: int) -> bool:
    start = (fault.ms or 0.0) * MS
    return start <= now < start + (fault.for_ms or 0.0) * MS


def _poison(what: str, sender: str) -> Deliver:
    def deliver(owner: Any) -> None:
        owner.poisoned_by(what, sender)

    return deliver
