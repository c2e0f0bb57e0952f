"""What vLLM's own scheduler makes of requests around the real connector: chunks, queues, prefix hits, plain requests."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import Result, build, run
from kvcover.real_backend.tiers.connector import connector_tier
from tests.real.test_connector_tier import needs

pytestmark = pytest.mark.vllm
TIGHT = {"num_blocks": 8}  # of which a request takes four, and a fifth when it generates

# Scenario, and outcomes, coverage at go and at the end as the real connector of 0.33.0 had them.
CASES: dict[str, tuple[dict[str, Any], list[str], float, float]] = {
    "equal chunks": ({"prompt_tokens": 96, "prefill": {"max_tokens_per_step": 32}}, ["ok"], 1.0, 1.0),
    "unequal chunks": ({"prompt_tokens": 100, "prefill": {"max_tokens_per_step": 30}}, ["ok"], 1.0, 1.0),
    "unequal chunks, READ": ({"mode": "read", "prompt_tokens": 100, "prefill": {"max_tokens_per_step": 30}}, ["ok"], 1.0, 1.0),
    "one token": ({"prompt_tokens": 1}, ["ok"], 1.0, 1.0),
    "one token, READ": ({"mode": "read", "prompt_tokens": 1}, ["recomputed"], 0.0, 0.0),
    "a plain request": ({"requests": [{"plain": True}, {}]}, ["recomputed", "ok"], 0.5, 0.5),
    "a plain request, READ": ({"mode": "read", "requests": [{"plain": True}, {}]}, ["recomputed", "ok"], 0.5, 0.5),
    "a prefix hit": ({"prompt_tokens": 64, "requests": [{"decode_hit_blocks": 2}]}, ["ok"], 1.0, 1.0),
    "a prefix hit, READ": ({"mode": "read", "prompt_tokens": 64, "requests": [{"decode_hit_blocks": 2}]}, ["ok"], 1.0, 1.0),
    "decode's queue": ({"prompt_tokens": 64, "requests": 3, "decode": TIGHT}, ["ok"] * 3, 1.0, 1.0),
    "decode's queue, READ": ({"mode": "read", "prompt_tokens": 64, "requests": 3, "decode": TIGHT}, ["ok"] * 3, 1.0, 1.0),
    "prefill's queue, READ": ({"mode": "read", "prompt_tokens": 64, "requests": 3, "prefill": TIGHT}, ["ok"] * 3, 1.0, 1.0),
    "an ack while prefill computes": (
        {"prompt_tokens": 96, "prefill": {"max_tokens_per_step": 16}, "faults": ["abort:0,at=before"]}, ["ok"], 0.0, 0.0,
    ),
}  # fmt: skip


def scenario(name: str) -> dict[str, Any]:
    return {"release": "0.33.0", "model": "layers=2,mla=64+16", "fabric": "loopback", **CASES[name][0]}


@pytest.fixture(scope="module")
def seen() -> dict[str, Result]:
    """All of them in one go."""
    needs("0.33.0")
    return dict(zip(CASES, connector_tier.many([build(scenario(name)) for name in CASES]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_runs_as_measured_and_the_model_agrees(seen: dict[str, Result], name: str) -> None:
    _, outcomes, at_go, at_end = CASES[name]
    real, model = seen[name], run(build(scenario(name)))
    assert (real.by_request, real.coverage, real.coverage_end, real.stray) == (outcomes, at_go, at_end, 0)
    assert (model.by_request, model.coverage) == (outcomes, at_go)
