"""The yardstick: a bare SimPy program that waits as often as the model must, and does nothing else.

Two processes a rank, as the connector has two threads: one computes the layers and hands each to the other, which waits
for its transfer; and one timeout for each message of the protocol. No ports, no parameters, no ledger, no history.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy


def bare_write(ranks: int, layers: int, messages_a_rank: int = 4) -> int:
    """Run it; returns the number of timeouts waited for: one a (rank, layer) and process, one a message."""
    env = simpy.Environment()

    def compute(queue: simpy.Store) -> Generator[Any, None, None]:
        for _ in range(messages_a_rank):
            yield env.timeout(50_000)
        for layer in range(layers):
            yield env.timeout(2_000_000)
            queue.put(layer)

    def write(queue: simpy.Store) -> Generator[Any, None, None]:
        for _ in range(layers):
            yield queue.get()
            yield env.timeout(7_000)

    for _ in range(ranks):
        queue = simpy.Store(env)
        env.process(compute(queue))
        env.process(write(queue))
    env.run()
    return ranks * (messages_a_rank + 2 * layers)
