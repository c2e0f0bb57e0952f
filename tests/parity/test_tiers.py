"""What every tier has in common: it declares what it can do, does that, and refuses the rest up front and by name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import InputError, Result, build, faults
from kvcover.faults import KINDS
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.real_backend.tiers.hardware import hardware_tier
from kvcover.sim.errors import TierError
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.features import FEATURES
from kvcover.sim.simulate import model_tier
from kvcover.sim.tiers import TIERS, Tier, injecting, load_tier, refuse_options
from tests.real.test_connector_tier import needs

BY_NAME: dict[str, Tier] = {"model": model_tier, "connector": connector_tier, "hardware": hardware_tier}

# One fault of each kind that must fire, and what its scenario has besides TP 2 on both sides and two requests.
FIRING: dict[str, tuple[str, dict[str, Any]]] = {
    "drop": ("drop:remote_tp_size", {}),
    "set": ("set:remote_tp_size=1", {}),
    "rename": ("rename:remote_tp_size=tp_size", {}),
    "swap": ("swap:remote_tp_size@prefill", {"decode": {"tp": 1}}),
    "stale": ("stale:transfer_id#1", {}),
    "drop-notice": ("drop-notice:write_done,to=D1", {}),
    "duplicate-notice": ("duplicate-notice:write_done,to=D0", {}),
    "delay-notice": ("delay-notice:remote_blocks,ms=50", {}),
    "reorder-notice": ("reorder-notice:remote_blocks,ms=50", {}),
    "poison-notice": ("poison-notice:write_done,to=D0", {}),
    "misroute-notice": ("misroute-notice:write_done,port=1", {}),
    "replay-notice": ("replay-notice:write_done,ms=50", {}),
    "fail-transfer": ("fail-transfer:read", {"mode": "read"}),
    "partial-transfer": ("partial-transfer:read,fraction=0.5", {"mode": "read"}),
    "delay-transfer": ("delay-transfer:write,ms=50", {}),
    "late-transfer": ("late-transfer:write,ms=50", {}),
    "lose-completion": ("lose-completion:read", {"mode": "read"}),
    "early-completion": ("early-completion:write,ms=50", {}),
    "sq-full": ("sq-full:read", {"mode": "read"}),
    "slow-nic": ("slow-nic:P1,factor=10", {"fabric": "cx7"}),
    "partition": ("partition:P1,ms=0,for=50", {}),
    "latency-spike": ("latency-spike:P1,ms=0,for=50,factor=10", {}),
    "crash-rank": ("crash-rank:P0,ms=0", {}),
    "restart-rank": ("restart-rank:P1,ms=0,for=1000", {}),
    "stall-rank": ("stall-rank:P1,ms=0,for=50", {}),
    "late-rank": ("late-rank:D1,ms=50", {}),
    "abort": ("abort:0,at=before", {}),
    "preempt": ("preempt:0", {"mode": "read"}),
    "stop-at-prefill": ("stop-at-prefill:0", {}),
    "delay-step": ("delay-step:decode,ms=50", {}),
    "fail-leg": ("fail-leg:decode", {}),
    "delay-leg": ("delay-leg:decode,ms=50", {}),
    "wrong-dp": ("wrong-dp:decode,dp=0", {"decode": {"tp": 1, "dp": 2}, "prefill": {"tp": 1}}),
    "stop-heartbeat": (
        "stop-heartbeat:prefill,ms=0",
        {"router": "vllm-router 0.1.17", "requests": [{}, {"arrival_ns": 9_000_000_000}]},
    ),
    "stale-registration": ("stale-registration:decode,tp=1", {}),
}


def scenario(kind: str) -> Scenario:
    fault, fields = FIRING[kind]
    usual = {"release": "0.33.0", "model": "layers=2,mla=64+16", "requests": 2, "prefill": {"tp": 2}, "decode": {"tp": 2}}
    return build({**usual, **connector_tier.can.pins, **fields, "faults": [fault]})


def fired(results: list[Result]) -> dict[str, int]:
    return {each.fault.partition(":")[0]: each.fired for result in results for each in result.faults}


def test_the_table_names_tiers_that_implement_the_protocol() -> None:
    assert list(BY_NAME) == list(TIERS)
    for name, tier in BY_NAME.items():
        assert load_tier(name) is tier
        assert tier.name == name
        assert tier.can.faults <= set(KINDS)
        assert set(tier.can.features or ()) <= set(FEATURES)


def test_every_kind_of_fault_can_be_injected_somewhere() -> None:
    assert [kind for kind in KINDS if not injecting(kind)] == []
    assert injecting("drop") == ["model", "connector", "hardware"]
    assert injecting("late-rank") == ["model", "connector"]
    assert injecting("slow-nic") == ["model"]


def test_every_kind_that_the_model_declares_fires_there() -> None:
    kinds = sorted(model_tier.can.faults)
    counts = fired(model_tier.many([scenario(kind) for kind in kinds]))
    assert [kind for kind in kinds if not counts[kind]] == []


@pytest.mark.vllm
def test_every_kind_that_the_connector_tier_declares_fires_there() -> None:
    needs("0.33.0")
    kinds = sorted(connector_tier.can.faults)
    counts = fired(connector_tier.many([scenario(kind) for kind in kinds]))
    assert [kind for kind in kinds if not counts[kind]] == []


@pytest.mark.parametrize(
    ("tier", "kind"), [(tier, kind) for tier in TIERS for kind in KINDS if kind not in BY_NAME[tier].can.faults]
)
def test_a_kind_that_is_not_declared_is_refused_by_name(tier: str, kind: str) -> None:
    """Before the machine is looked at: neither GPUs nor a vLLM are here when this is said."""
    good, bad = scenario("drop"), scenario(kind)
    for ask in (BY_NAME[tier].check, BY_NAME[tier].run, lambda each: BY_NAME[tier].many([good, each], keep_errors=True)):
        with pytest.raises(TierError) as refused:
            ask(bad)
        assert refused.value.place == "faults[0]"
        assert refused.value.problem == f"{kind} can't be injected on the {tier} tier"
        assert refused.value.hint == f"leave it out, or use --tier {' or '.join(injecting(kind))}"


def test_a_tier_that_runs_no_vllm_is_given_none() -> None:
    one = build({"model": "layers=1,mla=8"})
    asks = (model_tier.check, model_tier.run, lambda each, vllm: model_tier.many([each], [vllm]))
    for ask in asks:
        with pytest.raises(InputError) as refused:
            ask(one, "0.27.0")
        assert (refused.value.place, refused.value.problem) == ("--vllm", "'0.27.0': the model tier runs no vLLM")
        assert refused.value.hint == "leave it out, or use --tier connector or hardware"


@pytest.mark.parametrize(
    ("tier", "option", "value", "said"),
    [
        ("connector", "--jobs", 3, "--jobs: 3: the connector tier spreads its runs itself; leave it out, or use --tier model"),
        ("hardware", "--shrink", True, "--shrink: the hardware tier gives no two runs that are alike; leave it out, or use --tier model"),
    ],
)  # fmt: skip
def test_an_option_that_a_tier_cannot_use_is_refused_by_what_it_declares(tier: str, option: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as refused:
        refuse_options(BY_NAME[tier], {option: value})
    assert str(refused.value) == said
    refuse_options(BY_NAME[tier], {option: None, "--vllm": "installed"})
    refuse_options(BY_NAME[tier], {option: False})


def test_what_makes_no_sense_is_refused_before_anything_runs() -> None:
    good = build({"model": "layers=1,mla=8"})
    bad = msgspec.structs.replace(good, release="0.26")
    with pytest.raises(InputError, match=r"0\.26"):
        model_tier.many([good, bad], keep_errors=True)
    with pytest.raises(InputError, match=r"0\.26"):
        model_tier.check(bad)


def test_faults_know_no_tier() -> None:
    for path in Path(faults.__file__).parent.glob("*.py"):
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert words.isdisjoint(TIERS), path


def test_the_list_of_faults_asks_the_tiers_and_imports_no_vllm() -> None:
    code = (
        "import sys; from kvcover.sim.commands.lists import faults; faults(['--json'], standalone_mode=False);"
        "assert not {'torch', 'vllm', 'zmq'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = {row["name"]: row["tiers"] for row in json.loads(done.stdout)}
    assert rows == {kind: [name for name, tier in BY_NAME.items() if kind in tier.can.faults] for kind in KINDS}
