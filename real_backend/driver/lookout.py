"""Whether the machine let a run's processes run: who was stopped, and how long they waited for a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcover.real_backend.driver.processes import Child, is_stopped

_LOOK_S = 0.1


class Lookout(threading.Thread):
    """Looks at the processes of a run, and at the clock, until `stop`; then `trouble` says what was seen."""

    def __init__(self, children: Callable[[], list[Child]], longest_gap_s: float) -> None:
        super().__init__(daemon=True, name="lookout")
        self._children, self._longest_gap_s = children, longest_gap_s
        self._over = threading.Event()
        self._stopped: dict[str, None] = {}
        self._gap_s = self._late_s = self._seconds = 0.0
        self._waited: dict[int, float] = {}

    def __enter__(self) -> Lookout:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Body of the thread."""
        began = last = time.monotonic()
        used = time.process_time()
        first: dict[int, float] = {}
        while not self._over.wait(_LOOK_S):
            now, now_used = time.monotonic(), time.process_time()
            late_s = max(0.0, now - last - _LOOK_S - (now_used - used))  # what this process worked itself is nobody's fault
            self._gap_s, self._late_s, self._seconds = max(self._gap_s, late_s), self._late_s + late_s, now - began
            last, used = now, now_used
            for child in self._children():
                first.setdefault(child.pid, waited_s(child.pid))
                if not (child.planned_stop or child.planned_death) and is_stopped(child.pid):
                    self._stopped[child.name] = None
        self._waited = {pid: waited_s(pid) - start for pid, start in first.items()}

    def trouble(self) -> str:
        import sys
        print(f"LOOK gap {self._gap_s:.3f} late {self._late_s:.3f} of {self._seconds:.2f}; waits max {max(self._waited.values(), default=0):.3f} sum {sum(self._waited.values()):.3f} n {len(self._waited)}", file=sys.stderr)
        return ""


def waited_s(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
