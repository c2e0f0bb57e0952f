"""What a correct connector must survive: kinds of faults, and how `reference` may end under them.

Kinds that nothing can survive are left out: a rank that dies (its engine with it), bytes that land after their
completion, a router that sends a leg to another DP rank than it says, and heartbeats, which no connector sees.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from kvcover import resolve
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.grid import EVENT_FAULT_KINDS, event_fault_texts
from kvcover.sim.search.swarm import Swarm, features_of
from kvcover.sim.simulate import run_world

# kind: what may become of a request that the fault hits. A delay or a repetition must do no harm; what is lost must end
# in bounded time; only a timer that fires makes it `degraded`.
IN_BOUNDED_TIME = {"ok", "refused", "recomputed", "failed", "degraded"}
MUST: dict[str, set[str]] = {
    "drop-notice": IN_BOUNDED_TIME,
    "duplicate-notice": {"ok", "refused", "recomputed"},
    "delay-notice": IN_BOUNDED_TIME,
    "reorder-notice": IN_BOUNDED_TIME,
    "replay-notice": {"ok", "refused", "recomputed"},
    "poison-notice": IN_BOUNDED_TIME,
    "misroute-notice": IN_BOUNDED_TIME,
    "fail-transfer": IN_BOUNDED_TIME,
    "partial-transfer": IN_BOUNDED_TIME,
    "delay-transfer": IN_BOUNDED_TIME,
    "late-transfer": IN_BOUNDED_TIME,
    "lose-completion": IN_BOUNDED_TIME,
    "sq-full": IN_BOUNDED_TIME,
    "slow-nic": {"ok", "refused", "recomputed"},
    "partition": IN_BOUNDED_TIME,
    "latency-spike": IN_BOUNDED_TIME,
    "restart-rank": IN_BOUNDED_TIME | {"crash"},  # the requests that were in the engine are lost; those after must not hang
    "stall-rank": IN_BOUNDED_TIME,
    "late-rank": IN_BOUNDED_TIME,
    "abort": IN_BOUNDED_TIME,
    "preempt": {"ok", "refused", "recomputed"},
    "stop-at-prefill": {"ok", "refused", "recomputed"},
    "delay-step": IN_BOUNDED_TIME,
    "fail-leg": IN_BOUNDED_TIME,
    "delay-leg": IN_BOUNDED_TIME,
    "stale-registration": IN_BOUNDED_TIME,
}
NOBODY_SURVIVES = {"crash-rank", "early-completion", "wrong-dp", "stop-heartbeat"}
# An executor that kills a stalled engine after a second is not survived either, so engines keep their 300 s.
FEATURES = tuple(name for name in features_of(None, full=False, faults=False) if name not in ("engine", "timers"))
SWARM = Swarm(
    features=FEATURES, pins={"release": "reference", "prefill": {"executor_timeout_s": 1e5}, "decode": {"executor_timeout_s": 1e5}}
)


def test_every_kind_is_judged() -> None:
    assert set(MUST) | NOBODY_SURVIVES == {kind.name for kind in EVENT_FAULT_KINDS}


@pytest.mark.parametrize("kind", [kind for kind in EVENT_FAULT_KINDS if kind.name in MUST], ids=lambda kind: str(kind.name))
def test_reference_survives(kind: object) -> None:
    name = kind.name  # type: ignore[attr-defined]
    fired = 0
    for seed in itertools.count():
        draft = SWARM.draft(seed)
        draft.pop("decode_release", None)
        texts = event_fault_texts(kind, draft)  # type: ignore[arg-type]
        if texts:
            fault = texts[int(np.random.default_rng(seed).integers(len(texts)))]
            result, _ = run_world(resolve(msgspec.convert({**draft, "faults": [fault]}, Scenario)))
            assert result.outcome in MUST[name] | {"vacuous"}, f"{fault}: {result.outcome}, {result.replay}"
            fired += result.outcome != "vacuous"
        if fired >= 60 or seed >= 400:
            break
    assert fired > 0
