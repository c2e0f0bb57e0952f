"""The names of the public door, in one list. `kvcover` imports them all when the first of them is asked for."""

from __future__ import annotations

from kvcover.faults import KINDS as FAULTS
from kvcover.sim.cache.presets import PRESETS
from kvcover.sim.errors import InputError, KvcoverError, TierError
from kvcover.sim.releases.records import RELEASES
from kvcover.sim.results.arrays import arrays
from kvcover.sim.results.read import read_results
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import Result
from kvcover.sim.results.story import story
from kvcover.sim.results.verdict import Verdict, judge_run
from kvcover.sim.scenario.fabric import FABRICS, FabricSpec
from kvcover.sim.scenario.routers import ROUTERS
from kvcover.sim.scenario.scenario import Expect, Rdma, RequestSpec, Scenario, Side, Timers, Timing, Workload, build, load
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.search.explore import explore
from kvcover.sim.search.failures import Exploration
from kvcover.sim.search.matrix import matrix
from kvcover.sim.simulate import record_of, run, run_world
from kvcover.sim.tiers import TIERS, Tier, load_tier
from kvcover.sim.world import World

__all__ = [
    "FABRICS", "FAULTS", "PRESETS", "RELEASES", "ROUTERS", "TIERS", "Expect", "Exploration", "FabricSpec", "InputError",
    "KvcoverError", "Rdma", "Record", "RequestSpec", "Result", "Scenario", "Setup", "Side", "Tier", "TierError", "Timers",
    "Timing", "Verdict", "Workload", "World", "arrays", "build", "explore", "judge_run", "load", "load_tier", "matrix",
    "read_results", "record_of", "resolve", "run", "run_world", "story",
]  # fmt: skip
