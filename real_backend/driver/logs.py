"""Logs of the processes of a run outlive its work folder if somebody keeps them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_kept_in: ContextVar[Path | None] = ContextVar("_kept_in", default=None)


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Keep whole logs of all runs that end within it, in a folder that exists."""
    token = _kept_in.set(folder)
    try:
        yield
    finally:
        _kept_in.reset(token)


def keep(work: Path) -> None:
    """Copy every log below a work folder that is about to go to where logs are kept, if anywhere. Never raises."""
    folder = _kept_in.get()
    if folder is None:
        return
    count = len(list(folder.iterdir()))
    for log in sorted(work.rglob("*.log")):
        if log.is_file() and log.stat().st_size:
            count += 1
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the run
                shutil.copyfile(log, folder / f"{count}-{log.name}")
