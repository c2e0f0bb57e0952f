"""An exploration on disk as it goes, a line a chunk of runs: nothing is lost, and the same command goes on where it ended."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcover import __version__
from kvcover.sim.errors import InputError, short
from kvcover.sim.files import MB, read_text
from kvcover.sim.search.failures import Exploration, Tallied

NAME = "exploration.jsonl"
CODE = "code"
"""Where what is explored says which code is under test: the hash of each file."""
_PLACE = "--out"
_MOST = 1024 * MB
_PROBE = bytes(1 << 16)
_OTHER = "name another folder, or remove that file"


class Journal:
    """Chunks in the order in which they ended. `stored` are those of earlier commands, counted in by `restore`."""

    def __init__(self, folder: Path, what: Mapping[str, Any]) -> None:
        """Open the folder's file. Raises InputError if it can't be written, or holds another exploration than `what`."""
        self.path = folder / NAME
        self.stored: list[Tallied] = []
        head = json.dumps({"schema": 1, "kvcover": __version__, "explored": what}, sort_keys=True)
        _probe(folder)
        whole = self._read(head) if self.path.exists() else 0
        try:
            if self.path.exists():
                os.truncate(self.path, whole)  # a line that a killed command left half written
            if not whole:
                self._write(head.encode())
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _read(self, head: str) -> int:
        """Take in what is there; how many bytes of it are whole lines."""
        lines = read_text(self.path, _MOST, _OTHER).split("\n")
        whole = lines[:-1]  # what follows the last line's end is half a line, or nothing
        if whole and whole[0] != head:
            of = _edited(whole[0], head) or "another exploration, or of another kvcover"
            raise InputError(_PLACE, f"{short(str(self.path))} is of {of}", _OTHER)
        for number, line in enumerate(whole[1:], 2):
            try:
                self.stored.append(msgspec.json.decode(line, type=Tallied))
            except msgspec.MsgspecError as error:
                raise InputError(f"{self.path}: line {number}", f"is no part of an exploration: {error}", _OTHER) from None
        return sum(len(line.encode()) + 1 for line in whole)

    def restore(self, summary: Exploration) -> None:
        """Count in what earlier commands ran."""
        for report in self.stored:
            summary.count(report)

    def add(self, report: Tallied) -> None:
        """Keep what came of a chunk. Raises InputError if it can't be written, as on a full disk."""
        try:
            self._write(msgspec.json.encode(report))
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _write(self, line: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(line + b"\n")


def _edited(kept: str, head: str) -> str:
    """Which files of the code under test differ, if nothing else does between two first lines; else empty."""
    try:
        old, new = json.loads(kept), json.loads(head)
        before, after = old["explored"].pop(CODE), new["explored"].pop(CODE)
        changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    except (ValueError, TypeError, LookupError, AttributeError):
        return ""
    return f"other code: {', '.join(changed)} changed since, and old results would be mixed with new ones" if old == new else ""


def _probe(folder: Path) -> None:
    """Whether a file can be written here, and has room: before a long run, not after it."""
    path = folder / f".kvcover-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            path.unlink(missing_ok=True)


def _unwritable(path: Path, error: Exception) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(_PLACE, f"can't write {short(str(path))}: {why}", "name a folder that you may write to, with room in it")
