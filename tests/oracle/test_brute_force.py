"""The oracle against literal values: published tables, and runs of the real connectors with tagged bytes.

No value here comes from the simulator, and none is computed by the oracle's own helpers.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.oracle.brute_force import ABSENT, OUTCOMES, RELEASES, Expected, expected

MLA = 0
NO_FAN_OUT = RELEASES[:-1]
MAPPED = RELEASES[1:-1]  # one mapped decode rank a prefill rank
READS_SIZE = RELEASES[3:]  # ``remote_tp_size`` is looked at


def write(release: str, p: int, d: int, heads: int, **more: Any) -> Expected:
    """WRITE with both legs right, as a current router sends them."""
    legs: dict[str, Any] = {"prefill_value": d, "decode_value": p} | more
    return expected(release, "write", p, d, heads, **legs)


def read(release: str, p: int, d: int, heads: int, **more: Any) -> Expected:
    """READ as a current router sends it: the prefill response is forwarded, nothing else."""
    return expected(release, "read", p, d, heads, **({"forwarded_tp_size": True} | more))


def covered(e: Expected) -> list[float | None]:
    return [t[0] if t else None for t in e.triples]


# ---- equal sizes, and the collapse that started it all ----------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("heads", [MLA, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_equal_sizes_work_but_for_the_collapse(release: str, heads: int, size: int) -> None:
    e = write(release, size, size, heads)
    everyone = set(range(size))
    assert (e.told, e.prefill_told, e.prefill_acked) == (everyone, everyone, everyone)
    assert e.failed == set()
    assert e.prefill_expired == set()
    if release in ("0.25.1", "0.26.0") and size > 1:
        assert e.outcome == "corrupt"
        assert e.writers == [list(range(size))] + [[]] * (size - 1)
        assert covered(e)[1:] == [0.0] * (size - 1)
    else:
        assert e.outcome == "ok"
        assert e.coverage == 1.0
        assert e.writers == [[rank] for rank in range(size)]
    assert e.stray == [0] * size


@pytest.mark.parametrize("release", ["0.25.1", "0.26.0"])
def test_the_reported_collapse_eight_to_eight(release: str) -> None:
    e = write(release, 8, 8, MLA)  # the report: MLA, 8 and 8, seven eighths of decode KV unwritten, no error
    assert e.triples == [(1.0, 0.0, 0.0)] + [(0.0, 0.0, 1.0)] * 7
    assert e.told == set(range(8))
    assert e.coverage == 0.125
    assert (e.outcome, e.error) == ("corrupt", None)

    gqa = write(release, 8, 8, 8)  # rank 0 holds a mix, or the last writer's head
    assert gqa.triples[0] is None
    assert (gqa.covered_min[0], gqa.covered_max[0], gqa.touched[0]) == (
        0,
        gqa.cells_per_rank,
        gqa.cells_per_rank,
    )


@pytest.mark.parametrize("release", MAPPED)
def test_a_router_that_says_one(release: str) -> None:
    e = expected(release, "write", 4, 4, MLA, 1, 1)
    assert e.outcome == "corrupt"
    assert covered(e) == [1.0, 0.0, 0.0, 0.0]
    assert e.told == {0, 1, 2, 3}
    assert e.writers == [[0, 1, 2, 3], [], [], []]


def test_one_means_nothing_to_the_oldest() -> None:
    assert expected("0.24.0", "write", 4, 4, 8, 1, 1).outcome == "ok"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("value", [ABSENT, None, 0, ""])
def test_no_size(release: str, value: object) -> None:
    e = expected(release, "write", 4, 4, 8, value, value)
    assert e.outcome == ("corrupt" if release in ("0.25.1", "0.26.0") else "ok")


@pytest.mark.parametrize("release", READS_SIZE)
@pytest.mark.parametrize(("value", "same_as"), [("8", 8), (8.0, 8), (True, 1)])
def test_odd_spellings_of_a_size(release: str, value: object, same_as: int) -> None:
    assert expected(release, "write", 8, 8, 8, value, value) == expected(release, "write", 8, 8, 8, same_as, same_as)


@pytest.mark.parametrize("release", READS_SIZE)
def test_a_size_that_is_no_number(release: str) -> None:
    e = expected(release, "write", 2, 2, 8, "x", 2)
    assert e.outcome == "crash"
    assert e.told == set()
    assert e.coverage == 0.0
    d_leg = expected(release, "write", 2, 2, 8, 2, "x")
    assert d_leg.outcome == ("crash" if release == "0.33.0" else "ok")


# ---- WRITE with unequal sizes, up to 0.32 -----------------------------------------------------------------


def test_two_to_four_under_the_collapse() -> None:
    e = write("0.25.1", 2, 4, 2)
    assert e.writers == [[0, 1], [], [], []]
    assert e.told == {0, 1}
    assert e.outcome == "hang"


@pytest.mark.parametrize("release", READS_SIZE[:-1])
@pytest.mark.parametrize("heads", [MLA, 1, 2])
def test_two_to_four(release: str, heads: int) -> None:
    e = write(release, 2, 4, heads)
    assert e.writers == [[0], [], [1], []]
    assert covered(e) == [1.0, 0.0, 1.0, 0.0]
    assert e.told == {0, 1}  # 1 is told without data, 2 has data and isn't told
    assert e.prefill_told == {0, 1}
    assert e.prefill_acked == {0, 1}
    assert e.prefill_expired == set()
    assert e.outcome == "hang"


def test_four_to_two_under_the_collapse() -> None:
    e = write("0.25.1", 4, 2, MLA)
    assert e.writers == [[0, 1], []]
    assert e.told == {0, 1}
    assert e.prefill_told == {0, 1}
    assert e.prefill_expired == {2, 3}
    assert e.outcome == "corrupt"


@pytest.mark.parametrize("release", READS_SIZE[:-1])
def test_four_to_two(release: str) -> None:
    e = write(release, 4, 2, MLA)
    assert e.writers == [[0, 1], []]
    assert covered(e) == [1.0, 0.0]
    assert e.told == {0, 1}
    assert e.prefill_told == {0, 1}
    assert e.prefill_acked == {0, 1, 2, 3}
    assert e.prefill_expired == {2, 3}
    assert e.outcome == "corrupt"


def test_eight_to_four_and_back_measured_with_tagged_bytes() -> None:
    down = write("0.27.0", 8, 4, 4)
    assert covered(down) == [1.0, 1.0, 0.0, 0.0]
    assert down.writers == [[0, 1], [2, 3], [], []]
    assert (down.told, down.outcome) == ({0, 1, 2, 3}, "corrupt")
    up = write("0.27.0", 4, 8, 4)
    assert covered(up) == [1.0, 0.0] * 4
    assert (up.told, up.outcome) == ({0, 1, 2, 3}, "hang")


@pytest.mark.parametrize("release", READS_SIZE[:-1])
def test_eight_to_one(release: str) -> None:
    mla = write(release, 8, 1, MLA)
    assert (mla.coverage, mla.told, mla.prefill_told) == (1.0, {0}, {0})
    assert mla.prefill_expired == {1, 2, 3, 4, 5, 6, 7}
    assert mla.outcome == "degraded"
    gqa = write(release, 8, 1, 8)
    assert gqa.outcome == "corrupt"
    assert gqa.writers == [[0]]


@pytest.mark.parametrize("release", RELEASES[:-1])
def test_split_heads_to_more_ranks_never_fit(release: str) -> None:
    """The V plane of a cache with twice the heads a rank starts where the region of the real one ends."""
    e = write(release, 2, 4, 8)
    assert e.writers == [[], [], [], []]
    assert e.told == set()
    assert e.prefill_acked == {0, 1}
    assert e.outcome == "hang"
    assert e.error is not None
    assert "length out of range" in e.error


def test_split_heads_to_fewer_ranks_land_beside() -> None:
    """One head a rank into two: rows of one head go where rows of two belong. By hand, one block, two tokens.

    D0 reads K as (token 0: head 0, head 1), (token 1: head 0, head 1) in elements 0..3 of its plane, V in
    4..7. P0 puts its K (token 0, token 1) into 0..1, and its V where V of a one-head cache begins: 2..3.
    """
    e = expected(
        "0.27.0",
        "write",
        2,
        1,
        2,
        1,
        2,
        prefill_blocks=(0,),
        decode_blocks=(0,),
        prefill_num_blocks=1,
        decode_num_blocks=1,
    )
    # K head 0: element 0 right, element 2 holds a V: wrong. K head 1: 1 holds head 0: wrong. V: nothing.
    assert e.triples == [(0.0, 0.5, 0.5)]
    assert e.outcome == "corrupt"
    assert e.stray == [0]
    bigger = expected(
        "0.27.0",
        "write",
        2,
        1,
        2,
        1,
        2,
        prefill_blocks=(1,),
        decode_blocks=(1,),
        prefill_num_blocks=2,
        decode_num_blocks=2,
    )
    # K goes to 2..3 (block 0 of D), V to 4 + 2 = 6..7 (K of block 1, token 1).
    assert bigger.triples == [(0.0, 0.5, 0.5)]
    assert bigger.stray == [2]


@pytest.mark.parametrize("release", READS_SIZE[:-1])
def test_a_size_too_large(release: str) -> None:
    e = expected(release, "write", 2, 2, 8, 4, 2)
    assert e.stalled == {"P1"}
    assert e.told == {0}
    assert e.prefill_acked == {0}
    assert e.outcome == "hang"


@pytest.mark.parametrize("release", READS_SIZE[:-1])
@pytest.mark.parametrize("value", [6, 3, -1])
def test_a_size_that_cannot_be(release: str, value: int) -> None:
    e = expected(release, "write", 4, 4, 8, value, 4)
    assert e.writers == [[], [], [], []]
    assert e.told == set()
    assert e.prefill_acked == {0, 1, 2, 3}
    assert e.outcome == "hang"


def test_the_oldest_dials_its_own_number() -> None:
    down = write("0.24.0", 4, 2, MLA)
    assert (down.coverage, down.told, down.stalled) == (1.0, {0, 1}, {"P2", "P3"})
    assert (down.prefill_acked, down.outcome) == ({0, 1}, "degraded")
    up = write("0.24.0", 2, 4, MLA)
    assert (covered(up), up.told, up.outcome) == ([1.0, 1.0, 0.0, 0.0], {0, 1}, "hang")


# ---- WRITE in 0.33 ----------------------------------------------------------------------------------------

# (prefill, decode, heads) -> writers of every decode rank; each of them must be named once, no others.
FAN_TABLE: dict[tuple[int, int, int], list[list[int]]] = {
    (1, 2, 8): [[0], [0]],
    (1, 4, 2): [[0], [0], [0], [0]],
    (1, 8, MLA): [[0]] * 8,
    (2, 1, 8): [[0, 1]],
    (2, 1, 2): [[0, 1]],
    (2, 1, MLA): [[0]],
    (2, 4, 8): [[0], [0], [1], [1]],
    (2, 8, 8): [[0]] * 4 + [[1]] * 4,
    (2, 8, 2): [[0]] * 4 + [[1]] * 4,
    (4, 1, 8): [[0, 1, 2, 3]],
    (4, 1, 2): [[0, 2]],
    (4, 1, MLA): [[0]],
    (4, 2, 8): [[0, 1], [2, 3]],
    (4, 2, 2): [[0], [2]],
    (4, 2, MLA): [[0], [2]],
    (4, 8, 8): [[0], [0], [1], [1], [2], [2], [3], [3]],
    (8, 1, 8): [[0, 1, 2, 3, 4, 5, 6, 7]],
    (8, 1, 2): [[0, 4]],
    (8, 2, 8): [[0, 1, 2, 3], [4, 5, 6, 7]],
    (8, 2, 2): [[0], [4]],
    (8, 4, 8): [[0, 1], [2, 3], [4, 5], [6, 7]],
    (8, 4, 2): [[0], [2], [4], [6]],
    (8, 4, MLA): [[0], [2], [4], [6]],
    (3, 6, 6): [[0], [0], [1], [1], [2], [2]],
    (6, 3, MLA): [[0], [2], [4]],
    (2, 6, 2): [[0], [0], [0], [1], [1], [1]],
    (16, 8, 8): [[0], [2], [4], [6], [8], [10], [12], [14]],
}


@pytest.mark.parametrize(("p", "d", "heads"), FAN_TABLE)
def test_fan_out_and_fan_in(p: int, d: int, heads: int) -> None:
    e = write("0.33.0", p, d, heads)
    assert e.writers == FAN_TABLE[p, d, heads]
    assert e.coverage == 1.0
    assert e.stray == [0] * d
    assert e.told == set(range(d))
    assert e.prefill_told == set(range(p))
    assert e.prefill_acked == set(range(p))
    assert e.outcome == "ok"


@pytest.mark.parametrize(("p", "d"), [(3, 2), (6, 4), (4, 6), (2, 3)])
def test_sizes_without_a_common_measure_end_the_prefill_engine(p: int, d: int) -> None:
    e = write("0.33.0", p, d, MLA)
    assert (e.outcome, e.coverage, e.told, e.prefill_acked) == ("crash", 0.0, set(), set())


def test_key_dropped_two_to_four() -> None:
    gqa = expected("0.33.0", "write", 2, 4, 8)
    assert (gqa.coverage, gqa.told, gqa.prefill_acked, gqa.outcome) == (0.0, set(), {0, 1}, "hang")
    mla = expected("0.33.0", "write", 2, 4, MLA)
    assert covered(mla) == [1.0, 1.0, 0.0, 0.0]
    assert (mla.told, mla.outcome) == ({0, 1}, "hang")


def test_key_dropped_four_to_two() -> None:
    gqa = expected("0.33.0", "write", 4, 2, 8)
    assert gqa.triples == [(0.5, 0.0, 0.5), (0.0, 0.5, 0.5)]
    assert (gqa.coverage, gqa.told, gqa.outcome) == (0.25, {0, 1}, "corrupt")
    assert gqa.stalled == {"P2", "P3"}
    mla = expected("0.33.0", "write", 4, 2, MLA)
    assert (mla.coverage, mla.told, mla.stalled, mla.outcome) == (1.0, {0, 1}, {"P2", "P3"}, "leak")


def test_one_on_both_legs() -> None:
    gqa = expected("0.33.0", "write", 4, 4, 8, 1, 1)
    assert covered(gqa) == [1.0, 0.0, 0.0, 0.0]
    assert (gqa.told, gqa.failed, gqa.outcome) == (set(), {0}, "hang")
    assert (gqa.coverage, gqa.prefill_expired) == (0.25, {1, 2, 3})
    assert gqa.possible_outcomes == {"hang"}  # three notices and no message: one short of four
    fewer = expected("0.33.0", "write", 4, 2, 8, 1, 1)
    assert (fewer.failed, fewer.outcome, fewer.possible_outcomes) == ({0}, "hang", {"hang", "failed"})
    mla = expected("0.33.0", "write", 4, 4, MLA, 1, 1)
    assert (covered(mla), mla.told, mla.outcome) == ([1.0, 0.0, 0.0, 0.0], {0}, "hang")


def test_one_on_the_prefill_leg() -> None:
    e = expected("0.33.0", "write", 4, 4, 8, 1, 4)
    assert e.writers == [[0], [], [], []]
    assert (e.told, e.failed, e.prefill_acked, e.prefill_expired) == (set(), set(), {0, 1, 2, 3}, set())
    assert e.outcome == "hang"
    two = expected("0.33.0", "write", 4, 4, 8, 2, 4)
    assert (two.writers, two.outcome) == ([[0], [2], [], []], "hang")


def test_one_on_the_decode_leg() -> None:
    e = expected("0.33.0", "write", 2, 2, 8, 2, 1)
    assert (e.told, e.failed, e.prefill_told, e.outcome) == ({0}, {1}, {0}, "failed")


def test_four_for_two() -> None:
    gqa = expected("0.33.0", "write", 2, 2, 8, 4, 4)
    assert gqa.triples == [(0.5, 0.0, 0.5), (0.0, 0.5, 0.5)]
    assert (gqa.coverage, gqa.told, gqa.stalled, gqa.outcome) == (0.25, {0, 1}, {"P1"}, "corrupt")
    mla = expected("0.33.0", "write", 2, 2, MLA, 4, 4)
    assert (mla.coverage, mla.told, mla.prefill_acked, mla.outcome) == (1.0, {0, 1}, {0}, "leak")


@pytest.mark.parametrize("value", [3, -1])
def test_impossible_size(value: int) -> None:
    e = expected("0.33.0", "write", 4, 4, 8, value, value)
    assert e.outcome == "crash"
    assert e.told == set()


# ---- READ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES[1:])
@pytest.mark.parametrize("heads", [MLA, 1, 2])
def test_read_two_to_four(release: str, heads: int) -> None:
    e = read(release, 2, 4, heads)
    assert e.writers == [[0], [0], [1], [1]]
    assert (e.coverage, e.prefill_acked, e.outcome) == (1.0, {0, 1}, "ok")


@pytest.mark.parametrize("release", RELEASES[1:])
def test_read_four_to_two(release: str) -> None:
    e = read(release, 4, 2, MLA)
    assert e.writers == [[0], [2]]
    assert e.coverage == 1.0
    if release == "0.33.0":
        assert (e.prefill_acked, e.outcome) == ({0, 1, 2, 3}, "ok")
    else:
        assert (e.prefill_acked, e.outcome) == ({0, 2}, "degraded")


@pytest.mark.parametrize("release", RELEASES[1:])
@pytest.mark.parametrize(("p", "d", "heads"), [(2, 4, 8), (4, 2, 8), (4, 1, 8), (4, 1, 2)])
def test_read_refuses_split_heads(release: str, p: int, d: int, heads: int) -> None:
    e = read(release, p, d, heads)
    assert (e.outcome, e.coverage, e.prefill_acked) == ("crash", 0.0, set())


@pytest.mark.parametrize("release", RELEASES[1:])
def test_read_by_one_decode_rank(release: str) -> None:
    e = read(release, 4, 1, MLA)
    assert (e.coverage, e.writers) == (1.0, [[0]])
    assert e.outcome == ("ok" if release == "0.33.0" else "degraded")


@pytest.mark.parametrize("release", ["0.25.1", "0.26.0"])
def test_read_behind_a_proxy_that_forwards_no_size(release: str) -> None:
    e = expected(release, "read", 4, 4, MLA, 4, 4)
    assert e.writers == [[0], [0], [0], [0]]
    assert (e.coverage, e.prefill_acked, e.outcome) == (1.0, {0}, "degraded")
    assert expected(release, "read", 4, 4, 8, 4, 4).outcome == "crash"


@pytest.mark.parametrize("release", READS_SIZE)
def test_read_with_the_size_of_one(release: str) -> None:
    e = read(release, 4, 4, MLA, decode_value=1)  # a wrong ``remote_tp_size`` wins over a right ``tp_size``
    assert (e.writers, e.prefill_acked, e.outcome) == ([[0]] * 4, {0}, "degraded")
    assert read(release, 4, 4, 8, decode_value=1).outcome == "crash"


@pytest.mark.parametrize("release", READS_SIZE)
def test_read_without_a_size_from_fewer_ranks_blocks(release: str) -> None:
    e = expected(release, "read", 2, 4, MLA)
    assert (e.stalled, e.coverage, e.outcome) == ({"D2", "D3"}, 0.0, "hang")
    assert expected(release, "read", 4, 4, MLA).outcome == "ok"
    more = expected(release, "read", 4, 2, MLA)
    assert (more.coverage, more.prefill_acked, more.outcome) == (1.0, {0, 1}, "degraded")


def test_read_in_the_oldest() -> None:
    up = read("0.24.0", 2, 4, MLA)
    assert (covered(up), up.stalled, up.outcome) == ([1.0, 1.0, 0.0, 0.0], {"D2", "D3"}, "corrupt")
    assert read("0.24.0", 4, 2, MLA).outcome == "degraded"
    assert read("0.24.0", 4, 4, 8).outcome == "ok"
    assert read("0.24.0", 2, 1, 8).outcome == "corrupt"  # no guard


# decode list, prefill list, release -> outcome, coverage of the decode list. Block 9 doesn't exist on decode.
@pytest.mark.parametrize(
    ("release", "decode", "outcome", "coverage"),
    [
        *[(r, (20, 21, 22), "ok", 1.0) for r in RELEASES],
        *[(r, (21, 22), "crash", 0.0) for r in RELEASES[:2]],
        *[(r, (21, 22), "corrupt", 0.0) for r in RELEASES[2:7]],
        *[(r, (21, 22), "ok", 1.0) for r in RELEASES[7:]],
        *[(r, (20, 21, 22, 23), "crash", 0.0) for r in RELEASES[:7]],
        *[(r, (20, 21, 22, 23), "ok", 1.0) for r in RELEASES[7:]],
        *[(r, (20, 21, 22, 23, 24), "crash", 0.0) for r in RELEASES],
    ],
)
def test_read_pairing(release: str, decode: tuple[int, ...], outcome: str, coverage: float) -> None:
    e = read(
        release,
        2,
        2,
        2,
        prefill_blocks=(1, 2, 3),
        decode_blocks=decode,
        prefill_num_blocks=25,
        decode_num_blocks=25,
    )
    assert (e.outcome, e.coverage) == (outcome, coverage)
    if outcome == "corrupt":  # up to 0.29 into foreign blocks 2 and 3; in 0.30 into one's own, shifted by one
        assert e.stray == ([0, 0] if release == "0.30.0" else [8, 8])
        assert e.touched == ([4, 4] if release == "0.30.0" else [0, 0])


# ---- the rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_write_pairing(release: str) -> None:
    longer_here = write(release, 2, 2, 2, prefill_blocks=(1, 2, 3), tokens=4)
    assert longer_here.outcome == ("ok" if release in ("0.32.0", "0.33.0") else "hang")
    longer_there = write(release, 2, 2, 2, decode_blocks=(2, 0, 1))
    first_two = release in ("0.24.0", "0.25.1")
    collapse = release == "0.26.0"
    assert longer_there.outcome == ("hang" if first_two else "corrupt" if collapse else "ok")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("mode", "heads"), list(itertools.product(("write", "read"), (MLA, 2, 4))))
def test_pools_of_different_size_do_not_matter_with_equal_ranks(release: str, mode: str, heads: int) -> None:
    e = expected(
        release,
        mode,
        2,
        2,
        heads,
        2,
        2,
        forwarded_tp_size=True,
        prefill_blocks=(6, 1),
        decode_blocks=(0, 4),
        prefill_num_blocks=7,
        decode_num_blocks=5,
        head_dim=3,
        tokens=3,
    )
    collapse = mode == "write" and release in ("0.25.1", "0.26.0")
    assert e.outcome == ("corrupt" if collapse else "ok")


def test_unequal_pools_take_the_guard_away_in_the_newest_read() -> None:
    """Layouts that differ are read head by head; only the other path asks if the heads are the same."""
    assert read("0.33.0", 4, 4, 8, decode_value=1).outcome == "crash"
    e = read("0.33.0", 4, 4, 8, decode_value=1, decode_num_blocks=5)
    assert e.writers == [[0]] * 4
    assert e.triples == [(1.0, 0.0, 0.0)] + [(0.0, 1.0, 0.0)] * 3
    assert e.outcome == "corrupt"


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="not supported"):
        expected("0.33.0", "write", 4, 4, 6, 4, 4)


def test_every_pairing_is_consistent() -> None:
    sizes = (1, 2, 4, 8, 16)
    for release, p, d, heads, mode in itertools.product(RELEASES, sizes, sizes, (MLA, 1, 2, 4, 8, 16), ("write", "read")):
        for value in (ABSENT, 1, p, d):
            e = expected(release, mode, p, d, heads, value, value, forwarded_tp_size=True)
            case = (release, mode, p, d, heads, value)
            assert e.outcome in OUTCOMES, case
            assert len(e.writers) == len(e.triples) == len(e.stray) == d, case
            assert e.told | e.failed <= set(range(d)), case
            assert e.prefill_told | e.prefill_acked <= set(range(p)), case
            assert e.prefill_expired <= e.prefill_acked, case
            for low, high, touched, triple in zip(e.covered_min, e.covered_max, e.touched, e.triples, strict=True):
                assert 0 <= low <= high <= touched <= e.cells_per_rank, case
                assert triple is None or sum(triple) == pytest.approx(1), case
            if e.outcome in ("ok", "degraded", "leak"):
                assert (e.coverage, e.told) == (1.0, set(range(d))), case
            if e.outcome == "corrupt" and mode == "write":
                assert e.told == set(range(d)), case
                assert e.coverage_bounds[0] < 1, case
            if release in NO_FAN_OUT and mode == "write" and p < d:
                assert e.outcome == "hang", case
