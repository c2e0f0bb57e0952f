"""Bug-finding power: semantic mutants of a correct connector, each of which a blank swarm must catch.

A mutant exchanges one policy of `reference`, or breaks one function of the model. Seeds are those of the swarm without
faults; a mutant is caught by the first seed whose run is not `ok`, `refused` or `recomputed`, or fails a check.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcover import resolve
from kvcover.sim.errors import InputError, PeerRefusal
from kvcover.sim.moriio.decode import DecodeEngine
from kvcover.sim.moriio.decode_rank import DecodeRank
from kvcover.sim.moriio.prefill import PrefillEngine
from kvcover.sim.moriio.reports import Reports
from kvcover.sim.moriio.writer import Writer
from kvcover.sim.releases import blocks, maps
from kvcover.sim.releases.policies import FIELDS, Policy
from kvcover.sim.results.result import GOOD
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.swarm import Swarm, features_of
from kvcover.sim.simulate import run_world

MOST_SEEDS = 400
Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_head(patch: pytest.MonkeyPatch) -> None:
    """Every slice starts one head too early."""
    real = maps.map_fan

    def shifted(*args: Any) -> list[maps.Target]:
        return [msgspec.structs.replace(t, local=max(t.local - 1, 0)) for t in real(*args)]

    patch.setitem(FIELDS["write_map"].policies, "fan", Policy("mutant", shifted))


def wrong_slot(patch: pytest.MonkeyPatch) -> None:
    """Fan-in lands in the first slot always."""
    real = maps.map_fan

    def first(*args: Any) -> list[maps.Target]:
        return [msgspec.structs.replace(t, remote=0) for t in real(*args)]

    patch.setitem(FIELDS["write_map"].policies, "fan", Policy("mutant", first))


def one_writer_less(patch: pytest.MonkeyPatch) -> None:
    """Decode counts one writer too few."""
    real = maps.map_fan

    def fewer(*args: Any) -> list[maps.Target]:
        return [msgspec.structs.replace(t, writers=max(1, t.writers - 1)) for t in real(*args)]

    patch.setitem(FIELDS["write_map"].policies, "fan", Policy("mutant", fewer))


def port_off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(FIELDS["dial"].policies, "dp_times_tp_plus_tp", Policy("mutant", lambda dp, tp, size: dp * size + tp + 1))


def last_rank_not_told(patch: pytest.MonkeyPatch) -> None:
    def most(rank: int, targets: list[maps.Target]) -> list[int]:
        return [t.tp_rank for t in targets][: max(1, len(targets) - 1)]

    patch.setitem(FIELDS["write_done_to"].policies, "targets", Policy("mutant", most))


def one_ack_more(patch: pytest.MonkeyPatch) -> None:
    real = maps.acks_fan_in
    patch.setitem(FIELDS["acks"].policies, "fan_in", Policy("mutant", lambda own, peer: real(own, peer) + 1))


def blocks_shifted(patch: pytest.MonkeyPatch) -> None:
    """Pairs start at the second remote block."""
    real = blocks.pair_head

    def shifted(local: list[int], remote: list[int]) -> list[tuple[int, int]]:
        return real(local, remote[1:] + remote[:1])

    patch.setitem(FIELDS["write_pairing"].policies, "head", Policy("mutant", shifted))


def last_block_left_out(patch: pytest.MonkeyPatch) -> None:
    real = blocks.pair_head
    patch.setitem(FIELDS["write_pairing"].policies, "head", Policy("mutant", lambda a, b: real(a, b)[:-1] or real(a, b)))


def done_before_the_last_layer(patch: pytest.MonkeyPatch) -> None:
    """Prefill says done when all but one write have been posted."""
    real = Writer._finalize

    def early(self: Writer, job: Any) -> None:
        if job.sealed is not None and not job.closed and job.in_flight == 1:
            job.in_flight = 0
        real(self, job)

    patch.setattr(Writer, "_finalize", early)


def freed_early(patch: pytest.MonkeyPatch) -> None:
    """Prefill frees its blocks when the first rank reports."""
    real = PrefillEngine.report

    def report(self: PrefillEngine, transfer: Any, rank: str, counted: Any = None) -> None:
        self._reports[transfer.index] = self.me.tp
        real(self, transfer, rank, counted)

    patch.setattr(PrefillEngine, "report", report)


def never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeEngine, "_give_back", lambda self, transfer: None)


def resumed_at_the_first_report(patch: pytest.MonkeyPatch) -> None:
    real = Reports.report

    def report(self: Reports, transfer_id: str, failed: bool) -> bool:
        if transfer_id in self._mapped:
            self._counts[self._mapped[transfer_id].index] = self._ranks
        return real(self, transfer_id, failed)

    patch.setattr(Reports, "report", report)


def message_lost(patch: pytest.MonkeyPatch) -> None:
    """Every decode rank but the first ignores write-done."""
    real = DecodeRank.on_write_done

    def deaf(self: DecodeRank, *args: Any) -> None:
        if self.tp == 0:
            real(self, *args)

    patch.setattr(DecodeRank, "on_write_done", deaf)


OVERRIDES: dict[str, dict[str, str]] = {
    "reads tp_size": {"peer_tp": "tp_size_or_1"},
    "own rank map": {"write_map": "own_rank"},
    "blocks announced by own width": {"blocks_ready_width": "own_size"},
    "told by own number": {"write_done_to": "own_rank", "completion": "first_message"},
    "first message completes": {"completion": "first_message"},
    "ports collide": {"ports": "dp_plus_tp"},
    "dial without TP": {"dial": "dp_plus_tp"},
    "reads DP 0": {"read_dp": "zero"},
    "reads own rank": {"read_map": "own_rank"},
    "no barrier": {"read_barrier": "none"},
    "releases its source": {"release_to": "sources"},
    "releases at DP 0": {"release_port": "tp"},
    "pairs the head": {"read_pairing": "head"},
    "replaces the local list": {"read_pairing": "remote_tail_as_local"},
    "one ack is enough": {"acks": "any"},
    "garbage for plain requests": {"match_read": "always"},
    "plain requests wait": {"match_write": "always"},
    "empty list": {"external_zero": "empty_list"},
    "whole block list": {"write_clamp": "none"},
    "last chunk by blocks": {"last_chunk": "by_blocks"},
    "no barrier, and fast reads": {"read_barrier": "none"},
    "looks at the last layer": {"read_done": "last_layer"},
}
PATCHES: list[Patch] = [
    wrong_head, wrong_slot, one_writer_less, port_off_by_one, last_rank_not_told, one_ack_more, blocks_shifted,
    last_block_left_out, done_before_the_last_layer, freed_early, never_freed, resumed_at_the_first_report, message_lost,
]  # fmt: skip
SWARM = Swarm(features=features_of(None, full=False, faults=False), pins={"release": "reference"})
SEEDS_TO_CATCH: dict[str, int] = {}


# What a mutant needs to show at all: several queue pairs, or a slow rank, which a correct connector does not mind.
# Where reads are there at once nothing but the order of events shows that nobody waited for them.
PINS: dict[str, dict[str, Any]] = {
    "no barrier, and fast reads": {"mode": "read", "fabric": "loopback"},
    "looks at the last layer": {"mode": "read", "rdma": {"queue_pairs": 4}},
    "resumed_at_the_first_report": {"mode": "write", "faults": ["delay-transfer:write,from=P1,ms=50"]},
}


def seeds_to_catch(overrides: dict[str, str], pins: dict[str, Any]) -> int | None:
    swarm = Swarm(features=SWARM.features, pins={**SWARM.pins, **pins})
    for seed in range(MOST_SEEDS):
        draft = {**swarm.draft(seed), "overrides": overrides}
        draft.pop("decode_release", None)
        try:
            result, _ = run_world(resolve(msgspec.convert(draft, Scenario)))
        except InputError:
            continue  # the rank that is to be slow is not there
        except PeerRefusal:
            return seed + 1
        if result.outcome == "vacuous":
            continue
        if result.outcome not in GOOD or (result.outcome == "ok" and any(check.verdict == "fail" for check in result.checks)):
            return seed + 1
    return None


@pytest.mark.parametrize("name", list(OVERRIDES))
def test_policy_mutant_is_caught(name: str) -> None:
    seeds = seeds_to_catch(OVERRIDES[name], PINS.get(name, {}))
    assert seeds is not None, f"{name}: not caught in {MOST_SEEDS} seeds"
    SEEDS_TO_CATCH[name] = seeds


@pytest.mark.parametrize("mutate", PATCHES, ids=[patch.__name__ for patch in PATCHES])
def test_code_mutant_is_caught(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    seeds = seeds_to_catch({}, PINS.get(mutate.__name__, {}))
    assert seeds is not None, f"{mutate.__name__}: not caught in {MOST_SEEDS} seeds"
    SEEDS_TO_CATCH[mutate.__name__] = seeds


@pytest.mark.parametrize("pins", [{}, *PINS.values()])
def test_the_original_is_not_caught(pins: dict[str, Any]) -> None:
    assert seeds_to_catch({}, pins) is None


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    if not SEEDS_TO_CATCH:
        pytest.skip("runs with the mutants only")
    with capsys.disabled():
        worst = max(SEEDS_TO_CATCH, key=lambda name: SEEDS_TO_CATCH[name])
        print(f"\n{len(SEEDS_TO_CATCH)} mutants caught, median {statistics.median(SEEDS_TO_CATCH.values()):g} seeds, "
              f"most {SEEDS_TO_CATCH[worst]} ({worst})")  # fmt: skip
