"""A release that remembers which of its policies a run asked."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcover.sim.releases.policies import POLICIES
from kvcover.sim.releases.records import ConnectorRelease


class WatchedRelease(ConnectorRelease, frozen=True, kw_only=True):
    """The same policies; `asked` gets the field of each one that is looked up.

    What a run never asked can't have been a cause of what it did. Runs that nobody explains use plain records and pay nothing.
    """

    asked: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in POLICIES:
            super().__getattribute__("asked").add(name)
        return super().__getattribute__(name)


def watched(release: ConnectorRelease, asked: set[str]) -> ConnectorRelease:
    """The release, as one that adds to `asked`."""
    return WatchedRelease(**msgspec.structs.asdict(release), asked=asked)
