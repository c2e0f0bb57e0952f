"""How a program ends that is told to: SIGTERM and SIGHUP unwind it as Ctrl-C does."""

from __future__ import annotations

import signal
import time
from types import FrameType

_UNWINDING_S = 10.0
_received: list[int] = []


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP: `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


def interruption() -> KeyboardInterrupt:
    """What ends this program, also to be raised once more by a command that has kept what it had."""
    return Ended(_received[-1]) if _received and _received[-1] != signal.SIGINT else KeyboardInterrupt()


def unwind_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does; while it tidies up, more of any of them change nothing.

    A signal that is ignored, as under nohup, stays ignored.
    """
    began = -_UNWINDING_S

    def unwind(number: int, _frame: FrameType | None) -> None:
        nonlocal began
        if time.monotonic() - began < _UNWINDING_S:
            return
        began = time.monotonic()
        _received.append(number)
        raise interruption()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, unwind)
