"""How far long work is, and how long it will take: on stderr, on a terminal or where `--progress` asks for it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
_EVERY_S = 5.0
ASKED = "KVCOVER_PROGRESS"
"""Set in the environment, so that every process of a command knows: 1 asks for lines also where stderr is no terminal."""


class Progress:
    """Nothing is shown: what all kinds of progress can do."""

    def say(self, text: str) -> None:
        """What goes on now."""

    def advance(self, count: int = 1) -> None:
        """So many more are done."""


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Progress]:
    """Progress of `total` pieces of work (None: nobody knows how many), if anybody looks."""
    if total is not None and total < 2:
        yield Progress()
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bar(total, what) as bar:
            yield bar
    elif os.environ.get(ASKED) == "1":
        lines = _Lines(total, what)
        yield lines
    else:
        yield Progress()


def each(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Go through items, and show how far."""
    with progress(len(items), what) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def watched(text: Callable[[], str]) -> Iterator[None]:
    """Say every few seconds how far something is of which nobody knows how much it will be, if anybody looks."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not terminal and os.environ.get(ASKED) != "1":
        yield
        return
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_EVERY_S):
            line = f"kvcover: {text()}"
            print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=tell, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Lines(Progress):
    """A line now and then, for a log."""

    def __init__(self, total: int | None, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._started = self._told = time.monotonic()
        print(f"kvcover: {what}, {'number unknown' if total is None else total} to do", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        self._what = text

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._told >= _EVERY_S or self._done == self._total:
            self._told = now
            print(f"kvcover: {self._what}: {self._line(now - self._started)}", file=sys.stderr, flush=True)

    def _line(self, passed_s: float) -> str:
        if self._total is None:
            return f"{self._done} done in {passed_s:.0f} s"
        left_s = passed_s / self._done * (self._total - self._done)
        left = f", about {left_s:.0f} s left" if self._done < self._total else ""
        return f"{self._done} of {self._total} done in {passed_s:.0f} s{left}"


@contextmanager
def _bar(total: int | None, what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
               TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        class Shown(Progress):
            def say(self, text: str) -> None:
                bar.update(task, description=text)

            def advance(self, count: int = 1) -> None:
                bar.advance(task, count)

        yield Shown()
