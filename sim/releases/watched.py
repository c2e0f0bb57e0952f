"""A release that remembers which of its policies a run asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import ConnectorRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRelease(ConnectorRelease):
    """The same policies; `asked` gets the field of each one that is looked up.

    What a run never asked can't have been a cause of what it did. Runs that nobody explains use plain records and pay nothing.
    """

    asked: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            object.__getattribute__(self, "asked").add(name)
        return object.__getattribute__(self, name)


def watched(release: ConnectorRelease, asked: set[str]) -> ConnectorRelease:
    """The release, as one that adds to `asked`."""
    return WatchedRelease(**asdict(release), asked=asked)
