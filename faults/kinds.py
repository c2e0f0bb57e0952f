"""What every kind of fault says of itself, and how a fault is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec


class FaultSyntaxError(ValueError):
    """A fault that can't be read: the message says what would be right, `field` which field of a table it is about."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class FaultKind(msgspec.Struct, frozen=True):
    """One row of `kvcover faults`: how to write it, the point where it acts, and who saw it.

    `params` are the parameters that it takes besides its target.
    """

    name: str
    syntax: str
    point: str
    text: str
    report: str
    params: tuple[str, ...] = ()


def near(value: str, choices: Iterable[str], otherwise: str = "choose from") -> str:
    """The closest of some words, whatever their case, or all of them when none is close."""
    names = list(choices)
    close = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise} {', '.join(names)}"


def printable(text: str) -> bool:
    """Whether a name can stand in a shorthand and in a line of output: it is not empty, and all of it can be seen."""
    return bool(text) and text.isprintable() and not set(text) & set("@#=")
