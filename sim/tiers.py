"""The tiers by name, from the entry-point group `kvcover.tiers`, so that `sim` need not know any backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sim.errors import TierError, nearest


def load_tier(name: str) -> Callable[..., Any]:
    """The function that runs a scenario on the tier; raises TierError, never falls back to another tier."""
    tiers: dict[str, EntryPoint] = {point.name: point for point in entry_points(group="kvcover.tiers")}
    if name not in tiers:
        if name in ("engine", "hardware"):
            raise TierError("--tier", f"{name!r} is not part of this release", "use " + " or ".join(sorted(tiers, reverse=True)))
        raise TierError("--tier", f"no tier {name!r}", nearest(name, tiers))
    function: Callable[..., Any] = tiers[name].load()
    return function
