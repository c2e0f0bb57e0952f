"""kvcover: of the KV cache that decode needs, what fraction did prefill deliver?

The public API. Everything else is in rooms: `kvcover.sim` (the model), `kvcover.faults`, `kvcover.real_backend`.

from kvcover import Scenario, Side, run
run(Scenario(release="0.26.0", prefill=Side(tp=8), decode=Side(tp=8))).coverage
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcover.sim.errors import InputError
    from kvcover.sim.releases.records import RELEASES
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import RequestSpec, Scenario, Side, build, load
    from kvcover.sim.scenario.setup import resolve
    from kvcover.sim.simulate import run, run_world

__version__ = "0.1.0"
__all__ = [
    "RELEASES", "InputError", "RequestSpec", "Result", "Scenario", "Side", "build", "load", "resolve", "run", "run_world",
]  # fmt: skip

_HOMES = {
    "InputError": "kvcover.sim.errors",
    "RELEASES": "kvcover.sim.releases.records",
    "Result": "kvcover.sim.results.result",
    "run": "kvcover.sim.simulate",
    "run_world": "kvcover.sim.simulate",
    "RequestSpec": "kvcover.sim.scenario.scenario",
    "Scenario": "kvcover.sim.scenario.scenario",
    "Side": "kvcover.sim.scenario.scenario",
    "build": "kvcover.sim.scenario.scenario",
    "load": "kvcover.sim.scenario.scenario",
    "resolve": "kvcover.sim.scenario.setup",
}


def __getattr__(name: str) -> Any:
    """Import on first use: numpy and SimPy cost more than `kvcover --help` may."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'kvcover' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
