"""What every kind of fault says of itself."""

from __future__ import annotations

import msgspec


class FaultSyntaxError(ValueError):
    """A fault shorthand that can't be read; the message says what would be right."""


class FaultKind(msgspec.Struct, frozen=True):
    """One row of `kvcover faults`: how to write it, the point where it acts, the tiers that can, and who saw it.

    `params` are the parameters that it takes besides its target.
    """

    name: str
    syntax: str
    point: str
    tiers: tuple[str, ...]
    text: str
    report: str
    params: tuple[str, ...] = ()
