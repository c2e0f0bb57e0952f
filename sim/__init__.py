"""kvcover's model: which KV cells decode gets, simulated rank by rank.

from sim import Scenario, run
run(Scenario(release="0.26.0", prefill=Side(tp=8), decode=Side(tp=8))).coverage
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.errors import InputError
    from sim.releases import RELEASES
    from sim.result import Result
    from sim.scenario import RequestSpec, Scenario, Side, build, load
    from sim.setup import resolve
    from sim.simulate import run, run_world

__all__ = [
    "RELEASES", "InputError", "RequestSpec", "Result", "Scenario", "Side", "build", "load", "resolve", "run", "run_world",
]  # fmt: skip

_HOMES = {
    "InputError": "sim.errors",
    "RELEASES": "sim.releases",
    "Result": "sim.result",
    "run": "sim.simulate",
    "run_world": "sim.simulate",
    "RequestSpec": "sim.scenario",
    "Scenario": "sim.scenario",
    "Side": "sim.scenario",
    "build": "sim.scenario",
    "load": "sim.scenario",
    "resolve": "sim.setup",
}


def __getattr__(name: str) -> Any:
    """Import on first use: numpy and SimPy cost more than `kvcover --help` may."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
