"""A simulated address space: listeners on ports that are really bound, senders that never learn if nobody is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.clock import Clock
from sim.history import History

Address = tuple[str, int]


class Network:
    """Ports of all hosts. Like ZMQ without high-water marks, a send to a port that nobody bound succeeds and is lost."""

    def __init__(self, clock: Clock, history: History, latency_ns: int) -> None:
        self.clock = clock
        self.history = history
        self.latency_ns = latency_ns
        self._bound: dict[Address, Any] = {}
        self._next_free: dict[tuple[str, Address], int] = {}

    def bind(self, address: Address, owner: Any) -> bool:
        """Bind `owner` (a rank) to the port; False when another rank has it."""
        taken = address in self._bound
        if taken:
            other = self._bound[address].name
            self.history.add(self.clock.now, "bind_failed", owner.name, other, detail=f"{address[0]}:{address[1]}")
            return False
        self._bound[address] = owner
        self.history.add(self.clock.now, "bound", owner.name, detail=f"{address[0]}:{address[1]}")
        return True

    def owner(self, address: Address) -> Any | None:
        """Who bound the port, or None."""
        return self._bound.get(address)

    def send(self, sender: str, address: Address, request: int, what: str, deliver: Callable[[Any], None]) -> None:
        """Call `deliver(owner)` after the latency; messages of one sender to one port arrive in order."""
        owner = self._bound.get(address)
        now = self.clock.now
        if owner is None:
            self.history.add(now, "undelivered", sender, f"{address[0]}:{address[1]}", request, detail=what)
            return
        socket = (sender, address)
        # Strictly increasing arrival times keep one socket in order although the seed breaks ties.
        arrival = max(now + self.latency_ns, self._next_free.get(socket, 0))
        self._next_free[socket] = arrival + 1

        def arrive(_event: Any) -> None:
            if owner.deaf:
                self.history.add(self.clock.now, "undelivered", sender, owner.name, request, detail=what)
            else:
                deliver(owner)

        self.clock.after(arrival - now, arrive)
