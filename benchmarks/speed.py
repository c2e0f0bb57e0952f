"""Speed as ratios within one run: `python -m benchmarks.speed`. Machines are noisy, so ratios are medians of pairs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.bare_simpy import bare_write
from sim import Scenario, Side, resolve, run_world
from sim.matrix import run_matrix


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


def help_ms() -> float:
    """`kvcover --help` as a whole process."""
    command = [sys.executable, "-m", "sim", "--help"]
    times = [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(9)]
    return statistics.median(times) * 1e3


def main() -> None:
    for tokens in (4096, 65536):
        ratio, model_s = against_bare(tokens)
        print(f"P8→D8, 61 layers, {tokens} tokens: {ratio:.2f} × bare SimPy ({model_s * 1e3:.1f} ms; goal ≤ 2.5 at 4096)")
    pairs = [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)]
    print(f"default matrix: {seconds(lambda: run_matrix({}, ['write', 'read'], pairs, 'model', None)):.2f} s (goal ≤ 3 s)")
    print(f"kvcover --help: {help_ms():.0f} ms (goal ≤ 200 ms)")


if __name__ == "__main__":
    main()
