"""Same scenario and seed, same history, in any process; other seeds explore other orders of the same instant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

from kvcover import build, run
from kvcover.faults import Injector
from kvcover.sim.kernel.clock import Clock
from kvcover.sim.kernel.history import History
from kvcover.sim.kernel.network import Network

SCENARIO: dict[str, Any] = {
    "release": "0.26.0", "prefill": {"tp": 4}, "decode": {"tp": 4}, "model": "layers=4,kv_heads=8,head_dim=8",
    "requests": 3, "faults": ["set:remote_tp_size=2@decode#1"],
}  # fmt: skip


def digest_in_a_new_process(hash_seed: str) -> str:
    code = f"import json; from kvcover import build, run; print(run(build(json.loads({json.dumps(json.dumps(SCENARIO))}))).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_digest_does_not_depend_on_the_process() -> None:
    here = run(build(SCENARIO)).digest
    assert {here} == {run(build(SCENARIO)).digest} == {digest_in_a_new_process(seed) for seed in ("0", "1", "12345")}


def test_seeds_explore_orders() -> None:
    """In the collapse with several heads the last writer wins, and who is last is nobody's promise."""
    results = [run(build({**SCENARIO, "seed": seed})) for seed in range(20)]
    assert len({result.digest for result in results}) == 20
    assert len({result.by_rank[0].coverage for result in results}) > 1
    assert {result.outcome for result in results} == {"corrupt"}


class Listener:
    name = "listener"
    deaf = False

    def stalled_until(self, now: int) -> int:
        return now


def test_messages_of_one_socket_stay_in_order() -> None:
    for seed in range(30):
        clock = Clock(seed)
        network = Network(clock, History(), 10, Injector(()))
        arrived: list[int] = []
        network.bind(("h", 1), Listener())
        for number in range(6):
            network.send("a", ("h", 1), 0, "message", partial(take, arrived, number))
        clock.run()
        assert arrived == list(range(6))


def take(arrived: list[int], number: int, _owner: object) -> None:
    arrived.append(number)
