"""Which parts of a connector run may differ when it is run again, because the connector's own processes race."""

from __future__ import annotations

from dataclasses import dataclass

from kvcover.real_backend.driver.reports import RunSeen
from kvcover.real_backend.driver.trial import Trial


@dataclass(frozen=True, slots=True)
class Unsteady:
    """Why a result may differ between runs, the fields that depend on it, and those that can be stated in their place."""

    why: str
    omit: tuple[str, ...]
    instead: tuple[str, ...] = ()


OVERWRITTEN = Unsteady(
    "prefill ranks with different heads write the same cells of one decode rank; the last one wins",
    ("coverage", "wrong"),
    ("covered_plus_wrong",),
)
REFUSED = Unsteady(
    "a refused write ends prefill's step if decode's blocks came before its forward's end, else only the transfer",
    ("outcome", "prefill_released"),
)
ONE_ID = Unsteady(
    "two requests under one transfer id: whose data goes into whose blocks depends on which messages came first",
    ("coverage", "wrong", "prefill_released", "outcome"),
    ("covered_plus_wrong",),
)
NO_BARRIER = Unsteady(
    "decode doesn't wait for its reads: what is there when a layer is used depends on how fast they are",
    (),
    ("coverage_end",),
)
EARLY = Unsteady(
    "bytes of a planned early completion land while decode may already use its cells, or when its request is over",
    ("coverage", "wrong", "written", "outcome"),
)


def race_of(trial: Trial, seen: RunSeen) -> Unsteady | None:
    """Say why a result of prompt transfers may differ from run to run; None if it can't."""
    mode = trial.setup.scenario.mode
    if mode == "write" and any(batch.error and not batch.planned for rank in seen.ranks for batch in rank.batches):
        return REFUSED
    if _overwritten(trial, seen):
        return OVERWRITTEN
    ids = [str(legs.prefill["transfer_id"]) for legs in trial.legs if "transfer_id" in legs.prefill]
    if mode == "write" and len(set(ids)) < len(ids):
        return ONE_ID
    if any(fault.kind == "early-completion" and fault.ms for fault in trial.events):
        return EARLY
    return None


def _overwritten(trial: Trial, seen: RunSeen) -> bool:
    """Whether two prefill ranks that hold different heads wrote the same bytes of a decode rank."""
    writes: list[tuple[str, int, int, range]] = []
    for rank in seen.ranks:
        if rank.name.startswith("P"):
            heads = trial.setup.geometry.heads_of(int(rank.name[1:].split(".")[-1]), trial.setup.prefill.tp)
            writes += [(key, at, at + size, heads) for key, ranges in rank.wrote_to.items() for at, size in ranges]
    writes.sort(key=lambda write: write[:2])
    reach: tuple[str, int, range] | None = None  # the furthest end so far on this rank, and whose it is
    for key, start, end, heads in writes:
        if reach and key == reach[0] and start < reach[1] and heads != reach[2]:
            return True
        if not reach or key != reach[0] or end > reach[1]:
            reach = (key, end, heads)
    return False
