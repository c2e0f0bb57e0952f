"""The time model against MoRI's published tables, and its queues against closed forms."""

from __future__ import annotations

import pytest

from kvcover.sim.moriio.rank import Nic
from kvcover.sim.scenario.fabric import FABRICS

# docs/MORI-IO-BENCHMARK.md of ROCm/mori, averages in us. CX7: one transfer; Thor2: batches of 128 writes and 256 reads.
KIB = 1024
CX7 = {  # size: (write, read)
    1 * KIB: (5.87, 6.74), 4 * KIB: (5.88, 6.49), 8 * KIB: (5.96, 6.66), 16 * KIB: (6.11, 6.96), 32 * KIB: (6.64, 7.44),
    64 * KIB: (7.20, 8.23), 128 * KIB: (8.49, 9.66), 256 * KIB: (11.0, 12.5), 512 * KIB: (16.4, 18.3),
    1024 * KIB: (27.0, 30.0), 4096 * KIB: (90.4, 100.0), 16384 * KIB: (344.5, 379.8), 65536 * KIB: (1360.1, 1498.6),
}  # fmt: skip
THOR2 = {  # message size: (batch of 128 writes, batch of 256 reads)
    8: (36.3, 120.7), 1 * KIB: (37.1, 117.8), 4 * KIB: (42.1, 131.0), 8 * KIB: (52.1, 152.3), 16 * KIB: (74.0, 194.6),
    32 * KIB: (116.8, 281.1), 64 * KIB: (202.7, 459.0), 128 * KIB: (374.1, 805.6), 256 * KIB: (717.6, 1488.7),
    512 * KIB: (1403.6, 2867.3), 1024 * KIB: (2777.8, 5622.2),
}  # fmt: skip


def batch_us(name: str, size_bytes: int, mode: str) -> float:
    fabric = FABRICS[name]
    busy = fabric.occupancy_ns(size_bytes, mode)
    return (busy + fabric.tail_ns(busy, mode)) / 1e3


@pytest.mark.parametrize(("name", "table", "batch"), [("cx7", CX7, (1, 1)), ("thor2", THOR2, (128, 256))])
def test_presets_say_their_error(name: str, table: dict[int, tuple[float, float]], batch: tuple[int, int]) -> None:
    errors = [
        abs(batch_us(name, size * batch[i], mode) / published[i] - 1)
        for size, published in table.items()
        for i, mode in enumerate(("write", "read"))
    ]
    assert max(errors) <= FABRICS[name].fit_error + 0.01, max(errors)
    assert max(errors) >= FABRICS[name].fit_error - 0.02, "the stated error is larger than the real one"


def test_flows_into_one_nic_share_it() -> None:
    """Eight equal senders, one receiver: batch by batch, each gets an eighth, and all end at 8 x the time of one."""
    senders, receiver = [Nic() for _ in range(8)], Nic()
    ends = [[sender.occupy(receiver, 0, 100) for sender in senders] for _ in range(10)]
    assert max(ends[-1]) == 8 * 10 * 100
    assert [round(end / 100) for end in ends[0]] == list(range(1, 9))


def test_a_send_queue_has_room_when_enough_landed() -> None:
    nic = Nic()
    for lands_at in (100, 200, 300):
        nic.queued(lands_at, 4)
    assert nic.queue(0, 4, depth=16) == 0
    assert nic.queue(0, 4, depth=12) == 100
    assert nic.queue(0, 8, depth=12) == 200
    assert nic.queue(150, 4, depth=12) == 150
