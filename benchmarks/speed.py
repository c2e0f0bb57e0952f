"""Speed as ratios within one run: `python -m benchmarks.speed`. Machines are noisy, so ratios are medians of pairs."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.bare_simpy import bare_write
from kvcover import Scenario, Side, build, matrix, resolve, run_world
from kvcover.sim.results.depart import steps_of
from kvcover.sim.results.trace import trace


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def against_bare(prompt_tokens: int, pairs: int = 15) -> tuple[float, float]:
    """P8 → D8, 61 layers: median of (model / bare SimPy), and the model's median in seconds."""
    setup = resolve(
        Scenario(release="0.27.0", model="deepseek-v3", prompt_tokens=prompt_tokens, prefill=Side(tp=8), decode=Side(tp=8))
    )
    run_world(setup), bare_write(8, 61)
    model, ratios = [], []
    for _ in range(pairs):
        bare = seconds(lambda: bare_write(8, 61))
        model.append(seconds(lambda: run_world(setup)))
        ratios.append(model[-1] / bare)
    return statistics.median(ratios), statistics.median(model)


WIDE_EP = {
    "release": "0.33.0", "model": "deepseek-v3", "router": "wide-ep", "prompt_tokens": 4096,
    "prefill": {"dp": 16, "pods": 2}, "decode": {"dp": 16, "pods": 2}, "requests": 512, "workload": {"rate_per_s": 100},
}  # fmt: skip


def many_requests() -> tuple[float, float, float]:
    """512 requests, 2P2D, DP16, 61 layers: seconds, peak MB, and events/s as a share of the bare program's.

    The bare program is one of 512 ranks. Counted on both sides are the events that are waited for: a compute and a
    transfer for each (request, layer), and messages; not what a Store or a process start adds inside SimPy.
    """
    setup = resolve(build(WIDE_EP))
    shares, times = [], []
    for _ in range(5):
        started = time.perf_counter()
        bare_rate = bare_write(512, 61) / (time.perf_counter() - started)
        started = time.perf_counter()
        result, _world = run_world(setup)
        times.append(time.perf_counter() - started)
        shares.append(result.events / times[-1] / bare_rate)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return statistics.median(times), peak_mb, statistics.median(shares)


def traced(pairs: int = 15) -> float:
    """P8 → D8, 61 layers: median of (a run and its timeline) / (the run alone)."""
    setup = resolve(Scenario(release="0.27.0", model="deepseek-v3", prompt_tokens=4096, prefill=Side(tp=8), decode=Side(tp=8)))
    trace(setup, steps_of(run_world(setup)[1].history.rows))
    ratios = []
    for _ in range(pairs):
        alone = seconds(lambda: run_world(setup))
        ratios.append(seconds(lambda: trace(setup, steps_of(run_world(setup)[1].history.rows))) / alone)
    return statistics.median(ratios)


def help_ms() -> float:
    """`kvcover --help` as a whole process."""
    command = [sys.executable, "-m", "kvcover", "--help"]
    times = [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(9)]
    return statistics.median(times) * 1e3


def main() -> None:
    for tokens in (4096, 65536):
        ratio, model_s = against_bare(tokens)
        print(f"P8→D8, 61 layers, {tokens} tokens: {ratio:.2f} × bare SimPy ({model_s * 1e3:.1f} ms; goal ≤ 2.5 at 4096)")
    print(f"default matrix: {seconds(lambda: matrix(Scenario())):.2f} s (goal ≤ 3 s)")
    many_s, peak_mb, share = many_requests()
    print(f"512 requests, DP16 on 2 pods: {many_s:.1f} s (goal ≤ 20), {peak_mb:.0f} MB (goal ≤ 500), "
          f"{share:.2f} of the events/s of bare SimPy (goal ≥ 0.5)")  # fmt: skip
    print(f"a run with its timeline: {traced():.2f} × the run alone (goal ≤ 2)")
    print(f"kvcover --help: {help_ms():.0f} ms (goal ≤ 200 ms)")


if __name__ == "__main__":
    main()
