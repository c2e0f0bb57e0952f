"""The list of posted batches that the stand-in `mori.io` keeps by itself, kept for the real one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Posted:
    """One batch, as the connector gave it to `mori.io`."""

    kind: str
    remote_engine: str
    remote_ranges: tuple[tuple[int, int], ...]
    status: Any
    local: int
    at_ns: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(length for _, length in self.remote_ranges)


class _Session:
    """A session of the real `mori.io` that notes what is posted on it."""

    def __init__(self, session: Any, local: Any, remote: Any, posted: list[Posted]) -> None:
        self._session, self._local, self._remote, self._posted = session, local, remote, posted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batch_read(self, *args: Any) -> Any:
        """Pass a read on."""
        return self._note("read", args, self._session.batch_read(*args))

    def batch_write(self, *args: Any) -> Any:
        """Pass a write on."""
        return self._note("write", args, self._session.batch_write(*args))

    def _note(self, kind: str, args: tuple[Any, ...], status: Any) -> Any:
        ranges = tuple((int(self._remote.data) + offset, size) for offset, size in zip(args[1], args[2], strict=False))
        last = int(self._local.data) + (args[0][-1] + args[2][-1] - 1 if args[0] and args[2] else 0)
        self._posted.append(Posted(kind, str(self._remote.engine_key), ranges, status, last, time.monotonic_ns()))
        return status


def record_posts(mori_io: Any) -> None:
    """Let the real `mori.io` keep the list of posted batches that the stand-in keeps by itself.

    Statuses are kept with it: the library writes into one until its batch is complete, and a fault may let go of it before.
    """
    engine = mori_io.IOEngine
    if hasattr(engine, "posted"):
        return
    posted: list[Posted] = []
    engine.posted = posted
    create = engine.create_session

    def create_session(self: Any, local_mem: Any, remote_mem: Any) -> Any:
        session = create(self, local_mem, remote_mem)
        return None if session is None else _Session(session, local_mem, remote_mem, posted)

    engine.create_session = create_session
