"""SimPy's environment with integer nanoseconds and ties broken by the seed.

SimPy breaks ties first-in-first-out and so explores one interleaving only. Here two events of the same instant and
priority run in an order drawn from the seed. Order on one socket is kept by the sockets themselves
(`sim.network`), which never schedule two deliveries for the same instant.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL, Event

_DRAWS = 4096


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of that name: one SeedSequence tree a run, children addressed by name, not by order."""
    key = int.from_bytes(name.encode(), "little")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF)))


class Clock(simpy.Environment):
    """`simpy.Environment` in integer nanoseconds whose ties the seed decides."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._ties: list[int] = []
        self._tie_stream = stream(seed, "ties")
        self.events = 0

    @property
    def now(self) -> int:
        """Virtual time in ns."""
        return self._now  # type: ignore[return-value]

    def schedule(self, event: Event, priority: Any = NORMAL, delay: Any = 0) -> None:
        """Queue `event` after `delay` ns; replaces SimPy's tie counter by (draw, counter)."""
        if not self._ties:
            self._ties = self._tie_stream.integers(0, 1 << 31, _DRAWS).tolist()
        self.events += 1
        # one integer keeps heap comparisons cheap: the draw above, the unique counter below
        tie = (self._ties.pop() << 40) | next(self._eid)
        heappush(self._queue, (self._now + delay, priority, tie, event))

    def after(self, delay: int, action: Callable[[Any], None]) -> None:
        """Run `action(event)` in `delay` ns: a callback is cheaper than a process that only waits once."""
        timeout = self.timeout(delay)
        assert timeout.callbacks is not None
        timeout.callbacks.append(action)
