"""What the driver of a real run sees happen, as the events that the model logs; ranks keep their own and report them."""

from __future__ import annotations

import threading
import time

from kvcover.sim.kernel.events import Fields
from kvcover.sim.kernel.history import Row


class Journal:
    """Rows with times of the monotonic clock, in ns. All engines' threads write in it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._lock = threading.Lock()

    def log(self, kind: str, actor: str, peer: str = "", request: int = -1, layer: int = -1, fields: Fields | None = None) -> None:
        """Append an event that happens now."""
        with self._lock:
            self.rows.append((time.monotonic_ns(), kind, actor, peer, request, layer, fields))
