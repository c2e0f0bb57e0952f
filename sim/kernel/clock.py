"""SimPy's environment with integer nanoseconds and ties broken by the seed.

SimPy breaks ties first-in-first-out and so explores one interleaving only. Here two events of the same instant and
priority run in an order drawn from the seed. Order on one socket is kept by the sockets themselves
(`kvcover.sim.kernel.network`), which never schedule two deliveries for the same instant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from heapq import heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL, Event

MS = 1_000_000
"""Nanoseconds in a millisecond."""
NEVER = 1 << 62
"""A time (ns) that does not come."""
_FIRST_DRAWS, _MOST_DRAWS = 512, 65536


def ns(ms: float | None) -> int:
    """Milliseconds of a fault, none when it names none, in ns."""
    return round((ms or 0.0) * MS)


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of that name: one SeedSequence tree a run, children addressed by name, not by order."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(key & 0xFFFFFFFF, key >> 32)))


class _Call(Event):
    """An event that is triggered from birth: what SimPy's Timeout is, without its checks."""

    __slots__ = ()

    def __init__(self, clock: Clock, action: Callable[[Event], None]) -> None:
        self.env = clock
        self.callbacks = [action]
        self._ok = True
        self._value = None
        self._defused = False


class Clock(simpy.Environment):
    """`simpy.Environment` in integer nanoseconds whose ties the seed decides."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._ties: list[int] = []
        self._drawn = 0
        self._tie_stream = stream(seed, "ties")

    @property
    def now(self) -> int:
        """Virtual time in ns."""
        return self._now  # type: ignore[return-value]

    @property
    def events(self) -> int:
        """How many events have been scheduled."""
        return self._drawn - len(self._ties)

    def _draw(self) -> None:
        """More tie breakers: a random number above, a running one below, so that no two are equal."""
        count = min(max(_FIRST_DRAWS, self._drawn), _MOST_DRAWS)
        draws = self._tie_stream.integers(0, 1 << 30, count, dtype=np.int64)
        self._ties = ((draws << 32) | np.arange(self._drawn, self._drawn + count)).tolist()
        self._drawn += count

    def schedule(self, event: Event, priority: Any = NORMAL, delay: Any = 0) -> None:
        """Queue `event` after `delay` ns; where SimPy counts to break ties, this draws."""
        if not self._ties:
            self._draw()
        heappush(self._queue, (self._now + delay, priority, self._ties.pop(), event))

    def after(self, delay: int, action: Callable[[Event], None]) -> None:
        """Run `action(event)` in `delay` ns: cheaper than a process that only waits once."""
        if not self._ties:
            self._draw()
        heappush(self._queue, (self._now + delay, NORMAL, self._ties.pop(), _Call(self, action)))
