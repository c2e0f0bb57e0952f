"""A private folder of one node through which an engine's scheduler hands its steps to the ranks: they never cross a network."""

from __future__ import annotations

import os
from pathlib import Path

_KEPT = 2  # a rank may still read a step when the next is made


class Spool:
    """Steps as files in `folder`. Raises PermissionError if others than this user could have written there."""

    def __init__(self, folder: Path) -> None:
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not this user's alone")
        self._folder, self._count = folder, 0

    def put(self, step: bytes) -> int:
        """Keep a step, and say its number."""
        self._count += 1
        (self._folder / str(self._count)).write_bytes(step)
        (self._folder / str(self._count - _KEPT)).unlink(missing_ok=True)
        return self._count

    def take(self, number: int) -> bytes:
        """The step of that number."""
        return (self._folder / str(int(number))).read_bytes()
