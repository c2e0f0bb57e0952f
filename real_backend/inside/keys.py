"""Which keys of a leg the connector's code reads, on which line: a dictionary that notes who asks it.

It is a real `dict`, equal to the plain one, and becomes a plain one wherever it leaves the process. What it notes: reads by
the connector's files, of a value or of whether there is one. Asking for all names notes none of them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from kvcover.real_backend.inside.raising import CONNECTOR
from kvcover.sim.results.record import KeyRead, LegReads

_NONE: Any = object()


class Notes:
    """What was read of one leg, in the order of first reads."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int, bool, str], KeyRead] = {}
        self._copies: dict[str, int] = {}
        self._followed = 0
        self._copying: tuple[CodeType, int] | None = None

    def read(self, how: str, keys: Mapping[str, bool], default: Any = _NONE) -> None:
        """The caller's caller asked for these keys, each absent or not, and would take `default`."""
        frame = sys._getframe(2)
        if CONNECTOR not in frame.f_code.co_filename or self._copying == (frame.f_code, frame.f_lasti):
            return
        path, line = frame.f_code.co_filename, frame.f_lineno
        taken = "" if default is _NONE else repr(default)
        for key, absent in keys.items():
            place = (str(key), path, line, absent, taken)
            if place not in self._found:
                code = linecache.getline(path, line).strip()
                self._found[place] = KeyRead(str(key), Path(path).name, line, frame.f_code.co_name, code, how, absent, taken)

    def names(self) -> None:
        """The caller's caller asked for all names. If the same instruction goes on to read every value, it makes a copy."""
        frame = sys._getframe(2)
        self._copying = (frame.f_code, frame.f_lasti)
        if CONNECTOR in frame.f_code.co_filename:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self._copies[place] = self._copies.get(place, 0) + 1

    def follow(self) -> None:
        """A copy was found, and is watched as well."""
        self._followed += 1

    def left(self) -> None:
        """A copy leaves the process, where nobody sees who reads it."""
        self._copies["a pickle"] = self._copies.get("a pickle", 0) + 1

    def report(self) -> LegReads:
        """What was read so far; copies that were made and not found again may have been read unseen."""
        lost = sum(self._copies.values()) > self._followed
        return LegReads(tuple(self._found.values()), tuple(self._copies) if lost else ())


class WatchedLeg(dict[str, Any]):
    """The `kv_transfer_params` of one request, whose reads by the connector go into `notes`."""

    def __init__(self, params: Mapping[str, Any], notes: Notes) -> None:
        super().__init__(params)
        self.notes = notes

    def __getitem__(self, key: str) -> Any:
        self.notes.read("[]", {key: not super().__contains__(key)})
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.notes.read("get", {key: not super().__contains__(key)}, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        self.notes.read("in", {key: not there})  # type: ignore[dict-item]
        return there

    def pop(self, key: str, *default: Any) -> Any:
        self.notes.read("pop", {key: not super().__contains__(key)}, *default)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.notes.read("setdefault", {key: not super().__contains__(key)}, default)
        return super().setdefault(key, default)

    def items(self) -> Any:
        self.notes.read("items", dict.fromkeys(super().keys(), False))
        return super().items()

    def values(self) -> Any:
        self.notes.read("values", dict.fromkeys(super().keys(), False))
        return super().values()

    def keys(self) -> Any:
        self.notes.names()
        return super().keys()

    def __iter__(self) -> Iterator[str]:
        """Of its own, so that `dict(leg)` and `{**leg}` come by `keys` and can be seen to be copies."""
        return super().__iter__()

    def copy(self) -> WatchedLeg:
        return WatchedLeg(_plain(self), self.notes)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedLeg:
        import copy

        return WatchedLeg(copy.deepcopy(_plain(self), memo), self.notes)

    def __or__(self, other: Any) -> Any:
        made = _plain(self).__or__(other)
        return made if made is NotImplemented else WatchedLeg(made, self.notes)

    def __reduce__(self) -> tuple[Any, ...]:
        self.notes.left()
        return dict, (_plain(self),)


def _plain(leg: WatchedLeg) -> dict[str, Any]:
    """The same as a plain dictionary, without a note."""
    return dict(dict.items(leg))


def follow_copies(holder: object, legs: Mapping[str, WatchedLeg]) -> None:
    """Watch the copies of legs that an object keeps in its dictionaries by request id, as newer schedulers do."""
    for kept in vars(holder).values():
        if type(kept) is dict and not kept.keys().isdisjoint(legs):
            for request_id, leg in legs.items():
                copied = kept.get(request_id)
                if type(copied) is dict and copied.keys() >= set(dict.keys(leg)):
                    kept[request_id] = WatchedLeg(copied, leg.notes)
                    leg.notes.follow()
