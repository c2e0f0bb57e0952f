"""How fast exploration is: `python -m benchmarks.explore_speed`. Rates depend on the machine, ratios less so."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks.bare_simpy import bare_write
from benchmarks.speed import seconds
from kvcover.sim.search.explore import Work, run_jobs, seed_jobs
from kvcover.sim.search.failures import Exploration
from kvcover.sim.search.swarm import Swarm, features_of

P8_D8 = {
    "release": "0.27.0",
    "mode": "write",
    "model": "llama-3.1-8b",
    "prompt_tokens": 256,
    "prefill": {"tp": 8},
    "decode": {"tp": 8},
}


def jobs(seeds: int, pinned: bool = False) -> list[Work]:
    """All that a seed may draw; or nothing, so that every seed is the same scenario with another order of ties."""
    swarm = Swarm(features=(), pins=P8_D8) if pinned else Swarm(features=features_of(None, False, True))
    return list(seed_jobs(swarm, 0, seeds))


def one_size(rounds: int = 7, seeds: int = 50) -> tuple[float, float]:
    """P8 → D8, 32 layers, 256 tokens: scenarios a second in this process, and relative to bare SimPy's."""
    run_jobs(jobs(1, pinned=True))
    rates, ratios = [], []
    for _ in range(rounds):
        bare = seconds(lambda: [bare_write(8, 32) for _ in range(seeds)])
        took = seconds(lambda: run_jobs(jobs(seeds, pinned=True)))
        rates.append(seeds / took)
        ratios.append(bare / took)
    return statistics.median(rates), statistics.median(ratios)


def on_processes(processes: int, seeds: int) -> Exploration:
    """A swarm on so many processes; `seconds` counts from when they are up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcover.sim.search.explore"])
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        run_jobs(jobs(100), pool, 2 * processes)
        return run_jobs(jobs(seeds), pool, 2 * processes)


def main() -> None:
    rate, ratio = one_size()
    print(f"P8→D8, 32 layers, 256 tokens: {rate:.0f} scenarios/s, {ratio:.2f} of bare SimPy (goal ≥ 250/s or 0.4)")
    started = time.perf_counter()
    one = on_processes(1, 4000)
    two = on_processes(2, 4000)
    assert one.digest == two.digest
    print(f"swarm: {4000 / one.seconds:.0f}/s on 1 process, {4000 / two.seconds:.0f}/s on 2, "
          f"efficiency {one.seconds / two.seconds / 2:.2f} (goal ≥ 0.8)")  # fmt: skip
    print(f"10,000 seeds on 2 processes: {two.seconds * 2.5:.0f} s (goal ≤ 120 s); all took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
