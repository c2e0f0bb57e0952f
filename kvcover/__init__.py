"""kvcover: of the KV cache that decode needs, what fraction did prefill deliver, to the right rank, before decode was told to go?

    >>> result = run(Scenario(release="0.26.0", model="deepseek-v3", prefill=Side(tp=8), decode=Side(tp=8)))
    >>> result.outcome, result.coverage
    ('corrupt', 0.125)

This is the public door, and what a notebook needs is in it. Bad input is an `InputError` of one line, whoever made the object.

    describe    Scenario, Side, RequestSpec, Timers, Timing, Workload, Rdma, FabricSpec, Expect; load (a file), build (plain data)
    run         run; resolve (to a Setup) and run_world, for the finished World with its history; matrix, explore for many
                load_tier (of TIERS) for a Tier with vLLM's own code: `load_tier("connector").run(scenario, vllm)`
    judge       judge_run: the Verdict of a result, pass, fail or inconclusive, as every command gives it
    read        Result, with to_dict for plain data; read_results (a file of them) and arrays (many as numpy arrays); Exploration;
                record_of (a world, as a Record) and story (one request of it, step by step)
    choose of   RELEASES, PRESETS (models), ROUTERS, FABRICS, FAULTS
    errors      KvcoverError, and of it InputError and TierError

Behind it are rooms, of which no name is promised to stay. Imports go down only:

    kvcover.real_backend    vLLM's own connector in the harness, and on hardware
    kvcover.sim             the model: `scenario` what is to be run, `releases` what differs between them, `moriio` the engines,
                            `kernel` time, messages and events, `cache` which bytes are which cell, `results` what came of it,
                            `search` many runs, `report` pages of results, `commands` the command line
    kvcover.faults          faults as data, and the corpus of public reports
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvcover.door import *  # noqa: F403
    from kvcover.door import __all__ as __all__
else:

    def __getattr__(name):
        """The names of the door, when one is first asked for: numpy and SimPy cost more than `kvcover --help` may."""
        if name == "__all__" or not name.startswith("_"):
            import kvcover.door as door

            if name in ("__all__", *door.__all__):
                return getattr(door, name)
        raise AttributeError(f"module 'kvcover' has no attribute {name!r}")

    def __dir__():
        return sorted({*__getattr__("__all__"), *(name for name in globals() if name.startswith("__"))})
