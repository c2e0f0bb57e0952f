"""What happened: one append-only list of typed events. Results, findings and digests are views of it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypeVar

import msgspec

from kvcover.sim.kernel.events import Fields

F = TypeVar("F", bound=Fields)


Row = tuple[int, str, str, str, int, int, Fields | None]


class Event(NamedTuple):
    """One event: virtual time in ns, kind (see `events.KINDS`), who did it, to whom, for which request, in which layer.

    `fields` are the kind's own; use `History.having` where they are asked for.
    """

    time_ns: int
    kind: str
    actor: str
    peer: str = ""
    request: int = -1
    layer: int = -1
    fields: Fields | None = None

    @property
    def detail(self) -> str:
        """The kind's own fields in words."""
        return "" if self.fields is None else str(self.fields)


class History:
    """The events of a run, in the order in which they happened."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._by_kind: dict[str, list[Row]] = {}
        self._indexed = 0

    def add(
        self,
        time_ns: int,
        kind: str,
        actor: str,
        peer: str = "",
        request: int = -1,
        layer: int = -1,
        fields: Fields | None = None,
    ) -> None:
        self.rows.append((time_ns, kind, actor, peer, request, layer, fields))

    def __len__(self) -> int:
        return len(self.rows)

    def events(self, *kinds: str) -> list[Event]:
        """Events of these kinds (all kinds when none is named), in order."""
        return [Event(*row) for row in self.rows_of(*kinds)]

    def having(self, fields: type[F], *kinds: str) -> list[tuple[Event, F]]:
        """As `events`, each with its fields, which are of that type."""
        return [(event, event.fields) for event in self.events(*kinds) if isinstance(event.fields, fields)]

    def rows_of(self, *kinds: str) -> list[Row]:
        """As `events`, as plain tuples."""
        if not kinds:
            return self.rows
        if self._indexed != len(self.rows):
            self._index()
        rows = [row for kind in kinds for row in self._by_kind.get(kind, ())]
        if len(kinds) > 1:
            rows.sort(key=lambda row: row[0])
        return rows

    def _index(self) -> None:
        """Sort the rows by kind: reports ask for few kinds, and most rows are layers that landed."""
        self._by_kind = {}
        for row in self.rows:
            self._by_kind.setdefault(row[1], []).append(row)
        self._indexed = len(self.rows)

    def last_ns(self) -> int:
        return self.rows[-1][0] if self.rows else 0

    def digest(self) -> str:
        """Same scenario and seed, same digest, in any process."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.rows), digest_size=16).hexdigest()
