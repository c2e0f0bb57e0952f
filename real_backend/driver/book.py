"""The book of a run's faults: counts that all processes of a run share, in one small file."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcover.faults import EventFault, Fault, Injector

_CLOCK = struct.Struct("<d")


class SharedInjector(Injector):
    """An `Injector` whose counts live in a file: a fault fires on its n-th event of the run, whichever rank has it."""

    def __init__(self, faults: Sequence[Fault], book: Path) -> None:
        super().__init__(faults)
        self._counts = struct.Struct(f"<{2 * len(self.faults)}q")
        self._lock = threading.Lock()  # a file lock excludes other processes only
        self._file = os.open(book, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._file).st_size == 0:
            os.pwrite(self._file, bytes(_CLOCK.size + self._counts.size), 0)

    def start(self) -> None:
        """The run's legs leave now: `after` and `ms` of faults count from here."""
        os.pwrite(self._file, _CLOCK.pack(time.monotonic()), 0)

    def event(self, point: str, target: str, sender: str, receiver: str, request: int, layer: int = -1) -> list[EventFault]:
        """The faults that act on this event; they are counted."""
        if not self.plans(point):
            return []
        with self._open_book():
            (started,) = _CLOCK.unpack(os.pread(self._file, _CLOCK.size, 0))
            now_ms = (time.monotonic() - started) * 1e3 if started else 0.0
            return self.acting(point, target, sender, receiver, request, layer, now_ms)

    def note(self, fault: EventFault) -> None:
        """A fault of a rank or of a request did something."""
        with self._open_book():
            super().note(fault)

    def totals(self) -> tuple[int, ...]:
        """How often each fault has fired so far, in any process."""
        with self._open_book():
            return tuple(self.fired)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    @contextmanager
    def _open_book(self) -> Iterator[None]:
        """Read the counts, and write them back when done, while nobody else does."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                half = len(self.faults)
                counts = self._counts.unpack(os.pread(self._file, self._counts.size, _CLOCK.size))
                self._seen, self.fired = list(counts[:half]), list(counts[half:])
                yield
                os.pwrite(self._file, self._counts.pack(*self._seen, *self.fired), _CLOCK.size)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
