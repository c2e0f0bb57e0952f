"""Whether the machine let the processes of a run work: who was stopped, and who waited for a CPU for too long.

A connector's timers run on while its process doesn't. Then what looks like a hang is none, and what looks right may be luck.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvcover.real_backend.driver.processes import HELD, Child, is_stopped, scheduled
from kvcover.sim.errors import MachineError, TooBusy

_LOOK_S = 0.1
_MOST_LOST = 0.8
"""Part of a timer's time. Less refused healthy runs of sixteen ranks on two busy cores."""
_NEEDED_S = 0.2
"""What is enough for a rank in a timer's time, however long that is: where many share a CPU, each waits for most of it."""


class Lookout(threading.Thread):
    """Looks at the processes of a run, and at the clock, while it is entered.

    `trouble` says who was stopped: then a run need not go on. `busy` says who was slow once the run had begun, before which no
    timer runs. Both are empty for nothing. `timer_s` is the shortest timer of the connector in this run.
    """

    def __init__(self, children: Callable[[], list[Child]], timer_s: float) -> None:
        super().__init__(daemon=True, name="lookout")
        self._children, self._timer_s = children, timer_s
        self._over = threading.Event()
        self._stopped: dict[int, int] = {}
        self._begun = threading.Event()
        self.trouble = self.busy = ""

    def begin(self) -> None:
        """All processes are up, and timers matter from now on."""
        self._begun.set()

    def __enter__(self) -> Lookout:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()

    def check(self, timeless: bool = True) -> None:
        """Raise MachineError if there is trouble; and unless what came of the run is `timeless`, if somebody was slow."""
        for seen, error in ((self.trouble, MachineError), ("" if timeless else self.busy, TooBusy)):
            if seen:
                raise error("--tier", f"{seen}: the run says nothing", "run it again when the machine has room")

    def run(self) -> None:
        """Body of the thread."""
        own, of_children = _Lost(self._timer_s), dict[int, _Clock]()
        last, last_used = time.monotonic(), time.process_time()
        while not (self._over.wait(_LOOK_S) or self.trouble):
            now, used = time.monotonic(), time.process_time()
            if self._begun.is_set():
                own.add(now, now - last - _LOOK_S - (used - last_used))  # what this process worked itself is nobody's fault
            last, last_used = now, used
            if own.most > _MOST_LOST * self._timer_s:
                self.busy = f"the machine was too busy: this process was {own.most:.1f} s late"
            self.trouble = next(self._look(now, of_children), "")

    def _look(self, now: float, of_children: dict[int, _Clock]) -> Iterator[str]:
        for child in self._children():
            if child.planned_stop or child.planned_death or not child.pid:
                self._stopped.pop(child.pid, None)
                continue
            self._stopped[child.pid] = self._stopped.get(child.pid, 0) + 1 if is_stopped(child.pid) else 0
            if self._stopped[child.pid] > 1:  # a debugger's look is none
                yield f"process {child.name} is stopped"
            if not self._begun.is_set():
                continue
            clock = of_children.setdefault(child.pid, _Clock(child.pid, now, self._timer_s))
            clock.look(now)
            if clock.lost.most > max(_MOST_LOST * self._timer_s, self._timer_s - _NEEDED_S):
                self.busy = f"the machine was too busy: process {child.name} could not run for {clock.lost.most:.1f} s"


class _Lost:
    """Time that a process lost, and the `most` that it lost within `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._recent: deque[tuple[float, float]] = deque()
        self._sum = self.most = 0.0

    def add(self, now: float, lost_s: float) -> None:
        lost_s = max(0.0, lost_s)
        self._recent.append((now, lost_s))
        self._sum += lost_s
        while self._recent[0][0] < now - self._span_s:
            self._sum -= self._recent.popleft()[1]
        self.most = max(self.most, self._sum)


class _Clock:
    """What the main thread of a process lost. The system counts a wait when it is over; until then each look does."""

    def __init__(self, pid: int, now: float, span_s: float) -> None:
        self.lost = _Lost(span_s)
        self._pid, self._last, self._ahead_s = pid, now, 0.0
        _, self._ran_ns, self._waited_s = scheduled(pid)

    def look(self, now: float) -> None:
        state, ran_ns, waited_s = scheduled(self._pid)
        if ran_ns == self._ran_ns and state in HELD:
            lost_s = now - self._last
            self._ahead_s += lost_s
        else:
            lost_s, self._ahead_s = waited_s - self._waited_s - self._ahead_s, 0.0
            self._waited_s = waited_s
        self._last, self._ran_ns = now, ran_ns
        self.lost.add(now, lost_s)
