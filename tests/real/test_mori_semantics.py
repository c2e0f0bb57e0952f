"""What `mori.io` does, asked of the stand-in and of AMD's own library over the NIC in software: the same tests on both.

The library is what `kvcover mori add` built; without it its half is NOT RUN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcover.real_backend.inside.vllm_setup import LOOPBACK
from kvcover.real_backend.machine import mori
from tests.real.mori_rank import SIZE, Rank

pytestmark = pytest.mark.mori
PATTERN = bytes(index % 251 for index in range(SIZE))
FLUSHED = ("ERR_RDMA_OP", "Work Request Flushed Error")
KINDS = ("stand-in", *([each.version for each in mori.added()] or ["library"]))
_keys = itertools.count()


def folder_of(kind: str) -> Path:
    if kind == "stand-in":
        pytest.importorskip("msgpack", reason="NOT RUN: the stand-in needs msgpack")
        return LOOPBACK
    for each in mori.added():
        if each.version == kind:
            return each.folder
    pytest.skip(f"NOT RUN: no mori.io of AMD's here, get it with `kvcover mori add {mori.NEWEST}`")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[tuple[Rank, Rank]]:
    found = Rank(folder), Rank(folder)
    yield found
    for rank in found:
        rank.kill()


class Pair:
    """Two engines that know each other; `me` has a session with the region of `peer`, which holds PATTERN."""

    def __init__(self, me: Rank, peer: Rank) -> None:
        number = self.number = next(_keys)
        self.me, self.peer = me, peer
        mine, _ = me.ask("open", f"prefill:{number}:h:1:tp0:dp0", bytes(SIZE))
        self.theirs, self.region = peer.ask("open", f"decode:{number}:h:1:tp0:dp0", PATTERN)
        peer.ask("meet", mine)
        me.ask("meet", self.theirs)
        assert me.ask("pair", self.region) is True

    def post(self, kind: str, local: list[Any], remote: list[Any], sizes: list[Any]) -> Any:
        return self.me.ask("post", kind, local, remote, sizes)

    def read_ten(self) -> Any:
        return self.post("read", [0], [0], [10])


@pytest.fixture
def pair(ranks: tuple[Rank, Rank]) -> Pair:
    return Pair(*ranks)


def test_bytes_move_both_ways(pair: Pair) -> None:
    assert pair.post("read", [0, 4096], [8192, 100], [100, 50]) == ("SUCCESS", "success")
    assert pair.me.ask("content", 0, 100) == PATTERN[8192:8292] and pair.me.ask("content", 4096, 50) == PATTERN[100:150]
    assert pair.post("write", [4096], [0], [50]) == ("SUCCESS", "success")
    assert pair.peer.ask("content", 0, 60) == PATTERN[100:150] + PATTERN[50:60]
    assert pair.me.ask("one", "read", 7, 9, 5) == pair.me.ask("one", "write", 7, 9, 5) == ("SUCCESS", "success")
    assert pair.me.ask("content", 7, 5) == PATTERN[109:114]


def test_of_entries_that_overlap_the_last_by_remote_offset_wins(pair: Pair) -> None:
    assert pair.post("read", [0, 50], [5000, 100], [100, 100])[0] == "SUCCESS"
    assert pair.me.ask("content", 0, 100) == PATTERN[5000:5100]


def test_an_empty_batch_succeeds_and_so_does_one_of_no_bytes(pair: Pair) -> None:
    assert pair.post("write", [], [], [])[0] == "SUCCESS"
    assert pair.post("write", [0], [SIZE], [0])[0] == "SUCCESS"


@pytest.mark.parametrize("lists", [([0], [SIZE - 10], [20]), ([SIZE - 10], [0], [20]), ([100, 0], [200, SIZE], [50, 50])])
def test_what_leaves_a_region_is_refused_whole_and_the_session_goes_on(pair: Pair, lists: Any) -> None:
    assert pair.post("write", *lists) == ("ERR_INVALID_ARGS", "length out of range")
    assert pair.peer.ask("content", 200, 50) == PATTERN[200:250]
    assert pair.read_ten()[0] == "SUCCESS"


def test_lists_of_unequal_length_are_refused(pair: Pair) -> None:
    said = pair.post("read", [0, 1], [0], [10])
    assert said == ("ERR_INVALID_ARGS", "lengths of local offsets, remote offsets or sizes mismatch")


def test_a_size_beyond_32_bits_is_refused(pair: Pair) -> None:
    code, text = pair.post("read", [0], [0], [2**32])
    assert code == "ERR_INVALID_ARGS"
    assert text in ("length out of range", f"single request size {2**32} exceeds UINT32_MAX; split it before submitting")


@pytest.mark.parametrize("lists", [([-1], [0], [10]), ([0], [1.0], [10]), ([0], [2**64], [10])])
def test_numbers_that_are_no_offsets_are_a_type_error(pair: Pair, lists: Any) -> None:
    assert str(pair.post("read", *lists)).startswith("TypeError")


def test_waiting_goes_on_after_a_failure_and_gives_the_first_error(pair: Pair, folder: Path) -> None:
    good, bad = ([0], [0], [10]), ([0], [SIZE], [10])
    if folder.name.startswith("1.1."):  # the connector polls there, as it does where it finds no wait_all
        assert pair.me.ask("wait", [good]) == "AttributeError: 'IOEngine' object has no attribute 'wait_all'"
        return
    assert pair.me.ask("wait", [good, bad]) == "ERR_INVALID_ARGS"
    assert pair.me.ask("wait", [good, good]) == pair.me.ask("wait", []) == "SUCCESS"
    assert pair.me.ask("wait_for_none_posted") == ("INIT", True)


def test_an_error_stays(pair: Pair) -> None:
    assert pair.me.ask("updates") == ("INIT", "")
    assert pair.me.ask("updates", "ERR_RDMA_OP", "SUCCESS") == ("ERR_RDMA_OP", "err_rdma_op")
    assert pair.me.ask("updates", "IN_PROGRESS", "SUCCESS") == ("SUCCESS", "success")


def test_codes_are_no_numbers(pair: Pair) -> None:
    found = pair.me.ask("codes")
    assert found == {"begin": False, "equals a number": False, "ordered": "TypeError", "number": 13, "exported": False}


def test_numbers_start_at_zero_and_port_0_becomes_one_that_is_bound(pair: Pair) -> None:
    assert pair.me.ask("numbers") == (0, 0, 1, True)


@pytest.mark.parametrize("kind", ["EngineDesc", "MemoryDesc"])
@pytest.mark.parametrize("data", [b"", b"\x01rubbish", b"\x91\x01"])
def test_what_is_no_description_is_an_error(pair: Pair, kind: str, data: bytes) -> None:
    assert str(pair.me.ask("unpack", kind, data)).startswith("RuntimeError")


def test_no_session_without_a_backend(ranks: tuple[Rank, Rank]) -> None:
    me, peer = ranks
    theirs, region = peer.ask("open", f"decode:{next(_keys)}:h:1:tp0:dp0", PATTERN)
    me.ask("open", f"prefill:{next(_keys)}:h:1:tp0:dp0", bytes(SIZE), False)
    me.ask("meet", theirs)
    assert me.ask("pair", region) is False


def test_no_session_with_a_stranger(folder: Path, ranks: tuple[Rank, Rank]) -> None:
    me = Rank(folder)
    _, region = ranks[1].ask("open", f"decode:{next(_keys)}:h:1:tp0:dp0", PATTERN)
    me.ask("open", f"prefill:{next(_keys)}:h:1:tp0:dp0", bytes(SIZE))
    if folder.name.startswith("1.1."):
        with pytest.raises(EOFError):  # that version ends the process
            me.ask("pair", region)
    else:
        assert me.ask("pair", region) is False
    me.kill()


@pytest.mark.parametrize("connected", [False, True])
def test_an_idle_rank_leaves_its_core_alone(pair: Pair, connected: bool) -> None:
    if connected:
        assert pair.read_ten()[0] == "SUCCESS"
    assert pair.me.ask("cpu_s", 2.0) < 0.1


# -- a queue pair that is dead -----------------------------------------------------------------------------------


def is_dead(pair: Pair) -> None:
    """Every later batch is flushed, in a new session with the peer too."""
    assert pair.read_ten() == FLUSHED
    assert pair.me.ask("pair", pair.region) is True
    assert pair.read_ten() == FLUSHED


def test_memory_that_its_owner_took_back_kills_the_queue_pair(pair: Pair, folder: Path) -> None:
    assert pair.read_ten()[0] == "SUCCESS"
    pair.peer.ask("deregister")
    code, text = pair.read_ten()
    if folder.name.startswith("1.1."):  # that version takes nothing back
        assert code == "SUCCESS"
        return
    assert code == "ERR_RDMA_OP" and text.startswith("remote access error")
    is_dead(pair)


def test_own_memory_that_was_taken_back_kills_the_queue_pair(pair: Pair, folder: Path) -> None:
    assert pair.read_ten()[0] == "SUCCESS"
    pair.me.ask("deregister")
    code, text = pair.read_ten()
    if folder.name.startswith("1.1."):
        assert code == "SUCCESS"
        return
    assert code == "ERR_RDMA_OP" and text.startswith("local protection error")
    assert pair.read_ten() == FLUSHED


def test_an_offset_that_wraps_around_passes_the_check_and_kills_the_queue_pair(pair: Pair) -> None:
    code, text = pair.post("read", [0], [2**64 - 8], [16])
    assert code == "ERR_RDMA_OP" and text.startswith("remote access error")
    is_dead(pair)


def test_a_peer_that_is_gone_is_noticed_after_the_retries(folder: Path, ranks: tuple[Rank, Rank]) -> None:
    other = Rank(folder)
    pair = Pair(ranks[0], other)
    assert pair.read_ten()[0] == "SUCCESS"
    other.kill()
    assert pair.me.ask("alive") is True
    seconds, (code, text) = pair.me.ask("timed", "read", [0], [0], [10])
    assert code == "ERR_RDMA_OP" and text.startswith("transport retry counter exceeded")
    assert 0.5 < seconds < 2.0
    is_dead(pair)


def test_a_peer_that_came_back_under_its_name_finds_the_queue_pair_dead(folder: Path, ranks: tuple[Rank, Rank]) -> None:
    """The connector names an engine by host, port and rank, which a restarted one has again."""
    other = Rank(folder)
    pair = Pair(ranks[0], other)
    assert pair.read_ten()[0] == "SUCCESS"
    other.kill()
    again = Rank(folder)
    theirs, region = again.ask("open", f"decode:{pair.number}:h:1:tp0:dp0", PATTERN)
    pair.me.ask("meet", theirs)
    assert pair.me.ask("pair", region) is True
    assert pair.read_ten()[1].startswith("transport retry counter exceeded")
    assert pair.read_ten() == FLUSHED
    again.kill()


def test_a_peer_that_was_forgotten_and_met_again_has_the_queue_pair_that_it_had(ranks: tuple[Rank, Rank]) -> None:
    pair = Pair(*ranks)
    assert pair.post("read", [0], [2**64 - 8], [16])[0] == "ERR_RDMA_OP"
    pair.me.ask("forget", pair.theirs)
    pair.me.ask("meet", pair.theirs)
    is_dead(pair)
