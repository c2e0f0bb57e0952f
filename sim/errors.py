"""Every exception that kvcover raises on purpose, as one tree.

`InputError` is the user's: the command prints its one line and exits with 2. `PeerRefusal` and its
children are the *connector's*: they are raised by policies inside a run and become events, never tracebacks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvcoverError(Exception):
    """Base of all errors of this project."""


class InputError(KvcoverError):
    """Bad input: `place` (a field path, an option or a file), what is wrong there, and the nearest right value."""

    def __init__(self, place: str, problem: str, hint: str = "") -> None:
        super().__init__(place, problem, hint)
        self.place = place
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.place}: {self.problem}"
        return f"{line}; {self.hint}" if self.hint else line


class TierError(InputError):
    """The tier that was asked for can't run here. It never falls back to another."""


class PeerRefusal(KvcoverError):
    """A connector function raised: `error` is the exception class that the real code raises there."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(error, text)
        self.error = error
        self.text = text

    def __str__(self) -> str:
        return f"{self.error}: {self.text}"


def nearest(value: str, choices: Iterable[str]) -> str:
    """Hint that names the closest of `choices`, or lists them when nothing is close."""
    names = sorted(choices)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "choose from " + ", ".join(names)
