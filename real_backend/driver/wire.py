"""Plain data over a socket: what ranks on several nodes and their leader say to each other, without pickle.

A message is msgpack: lists, and a letter for what msgpack has no word for. Only classes that are listed here come back, and
nothing that comes in is ever run.
"""

from __future__ import annotations

import numbers
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvcover.real_backend.driver.reports import (
    Answer,
    Escaped,
    Planned,
    Post,
    RankReport,
    SchedulerReport,
    SentNotice,
    StepReport,
    Updated,
)  # fmt: skip
from kvcover.sim.cache.ledger import Count
from kvcover.sim.cache.wrong import WrongCells
from kvcover.sim.results.record import KeyRead, LegReads

_KNOWN = (Answer, Count, Escaped, KeyRead, LegReads, Planned, Post, RankReport, SchedulerReport, SentNotice, StepReport, Updated,
          WrongCells)  # fmt: skip
_CLASSES: dict[str, type[Any]] = {each.__name__: each for each in _KNOWN}
_LONGEST = 256 << 20


class Wire:
    """A connection that carries plain data, to be used as a `Connection` is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.poll, self.fileno, self.close = connection.poll, connection.fileno, connection.close

    def send(self, value: Any) -> None:
        """Send one message. Raises TypeError for what is no plain data, OSError if nobody is there."""
        self._connection.send_bytes(encode(value))

    def recv(self) -> Any:
        """Wait for one message. Raises EOFError or OSError if there is none any more, or what came is none."""
        return decode(self._connection.recv_bytes(_LONGEST))


def encode(value: Any) -> bytes:
    """One value as bytes. Raises TypeError for what is no plain data."""
    return msgspec.msgpack.encode(_to_lists(value))


def decode(data: bytes) -> Any:
    """The value again. Raises OSError for what `encode` never wrote."""
    try:
        return _from_lists(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise OSError(f"no message of a run: {error}") from None


def _to_lists(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if -(1 << 63) <= number < 1 << 63 else ["i", str(number)]
    if isinstance(value, numbers.Real):
        return float(value)
    for letter, kind in _SEQUENCES.items():
        if type(value) is kind:
            return [letter, *map(_to_lists, value)]
    if isinstance(value, dict):
        return ["d", *(_to_lists(part) for pair in value.items() for part in pair)]
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return ["o", name, *(_to_lists(getattr(value, field)) for field in _fields(value))]
    raise TypeError(f"{name} is no plain data")


def _fields(value: Any) -> tuple[str, ...]:
    """The names of what a known class is made with, in order."""
    return tuple(each.name for each in fields(value)) if is_dataclass(value) else value.__struct_fields__


_SEQUENCES: dict[str, type[Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}


def _from_lists(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    letter, *parts = value
    if letter == "i":
        return int(parts[0])
    if letter == "o":
        return _CLASSES[parts[0]](*map(_from_lists, parts[1:]))
    found = list(map(_from_lists, parts))
    if letter == "d":
        return dict(zip(found[::2], found[1::2], strict=True))
    return _SEQUENCES[letter](found)
