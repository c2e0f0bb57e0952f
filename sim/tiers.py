"""The tiers by name, and where each of them is, so that `sim` imports no backend before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvcover.sim.errors import TierError, nearest

TIERS = {
    "model": "kvcover.sim.simulate:model_tier",
    "connector": "kvcover.real_backend.tiers.connector:connector_tier",
    "hardware": "kvcover.real_backend.tiers.hardware:hardware_tier",
}


def load_tier(name: str) -> Callable[..., Any]:
    """The function that runs a scenario on the tier; raises TierError, never falls back to another tier."""
    if name not in TIERS:
        raise TierError("--tier", f"no tier {name!r}", nearest(name, TIERS))
    module, _, attribute = TIERS[name].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function
