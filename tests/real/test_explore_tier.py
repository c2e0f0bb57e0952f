"""Exploration on a real tier: what can't be run is no pass, a difference from the model is the worst failure, timing is not one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvcover import InputError, Result, build, load, run
from kvcover.real_backend.machine import trees
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.real_backend.tiers.declared import DRAWN, fit
from kvcover.sim.commands.explore import explore as explore_command
from kvcover.sim.errors import TierError
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.explore import seed_jobs
from kvcover.sim.search.explore_tier import TierExploration, against_model, drafts_of, pinned
from kvcover.sim.search.failures import Exploration
from kvcover.sim.search.features import FEATURES
from kvcover.sim.search.shrink import Draft
from kvcover.sim.search.swarm import Swarm
from kvcover.sim.tiers import NOT_BEGUN, Capabilities, Pace, Tier

MLA = "layers=1,mla=8"
Real = Callable[[Result, int], Result | TierError]


def as_the_model(result: Result, _time: int) -> Result:
    return result


class FakeTier(Tier):
    """Runs the model, and says of it what a test wants: `real` gets the result and how often this seed was run before."""

    name = "connector"
    can = Capabilities(faults=connector_tier.can.faults, features=("read", "tp", "fabric"), pins={"model": MLA, "prompt_tokens": 16},
                       takes_vllm=True)  # fmt: skip

    def __init__(self, real: Real = as_the_model) -> None:
        self._real = real
        self.runs: dict[int, int] = {}

    def fit(self, draft: Draft) -> None:
        draft["block_size"] = 16

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        if scenario.prefill.tp > 4:
            raise TierError("prefill", f"{scenario.prefill.tp} ranks are too many", "use 4")

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> list[Result | TierError]:
        assert keep_errors
        found: list[Result | TierError] = []
        for position, scenario in enumerate(scenarios):
            time = self.runs.get(scenario.seed, 0)
            self.runs[scenario.seed] = time + 1
            found.append(NOT_BEGUN if pace.over() else self._real(run(scenario), time))
            pace.done(position, found[-1])
        return found


def explored(tier: FakeTier, count: int = 30, release: str = "0.33.0") -> Exploration:
    assert tier.can.features is not None
    swarm = Swarm(features=tier.can.features, pins=pinned(tier, {}, release))
    return TierExploration(tier).run(drafts_of(tier, seed_jobs(swarm, 0, count)))


def test_what_the_tier_cannot_run_is_skipped_with_its_reason() -> None:
    tier = FakeTier()
    summary = explored(tier)
    ((reason, count),) = summary.skipped.items()
    assert reason == "prefill: N ranks are too many"
    assert 0 < count < 30
    assert summary.outcomes["skipped"] == count == 30 - len(tier.runs)
    assert summary.outcomes["ok"] == 30 - count
    assert summary.failures == 0


def test_a_run_that_went_wrong_is_skipped_and_the_others_go_on() -> None:
    def broken(result: Result, _time: int) -> Result | TierError:
        return TierError("--tier", f"rank {result.seed} died", "") if result.mode == "read" else result

    summary = explored(FakeTier(broken))
    assert summary.skipped["--tier: rank N died"] > 1
    assert summary.outcomes["ok"] > 1


def worse(result: Result) -> Result:
    return msgspec.structs.replace(result, outcome="hang", sets=msgspec.structs.replace(result.sets, told=[]))


def test_a_difference_from_the_model_is_a_group_of_its_own_and_the_worst() -> None:
    summary = explored(FakeTier(lambda result, _time: worse(result) if result.mode == "read" else result), release="0.26.0")
    outcomes = [group.signature.outcome for group in summary.ranked()]
    assert outcomes[0] == "differs"
    assert "corrupt" in outcomes, "0.26.0 in WRITE, which the tier and the model agree in"
    first = summary.ranked()[0]
    assert first.signature.kinds[0] == "told"
    assert first.signature.kinds[1].startswith("outcome: model ")
    assert first.draft["expect"]["outcome"] == "hang"


def test_a_difference_that_does_not_come_again_is_timing() -> None:
    tier = FakeTier(lambda result, time: worse(result) if time == 0 and result.seed == 1 else result)
    summary = explored(tier)
    assert tier.runs[1] == 2
    assert (summary.varied, summary.failures) == (1, 0)


def test_what_a_race_decides_is_not_compared() -> None:
    result = run(build({"model": MLA}))
    other = msgspec.structs.replace(result, outcome="hang")
    assert against_model(other) == {"outcome": ["ok", "hang"]}
    raced = msgspec.structs.replace(other, backend={"race": {"why": "", "omit": ["outcome"], "instead": ["covered_plus_wrong"]}})
    assert against_model(raced) == {}


def test_the_digest_is_of_what_was_drawn_and_not_of_real_time() -> None:
    one, other = explored(FakeTier()), explored(FakeTier(lambda result, _time: worse(result)))
    assert one.digest == other.digest
    assert one.digest != explored(FakeTier(), count=29).digest


def test_the_release_is_that_of_the_tree_unless_it_is_given() -> None:
    tier = FakeTier()
    assert pinned(tier, {}, "0.27.0")["release"] == "0.27.0"
    assert pinned(tier, {"release": "0.28.0"}, "0.27.0")["release"] == "0.28.0"
    skewed = pinned(tier, {}, "0.27.0,0.33.0")
    assert (skewed["release"], skewed["decode_release"]) == ("0.27.0", "0.33.0")
    assert "release" not in pinned(tier, {}, "/home/me/vllm")
    assert "decode_release" not in pinned(tier, {}, "0.27.0")


def command(monkeypatch: pytest.MonkeyPatch, tier: FakeTier, *words: str) -> str:
    monkeypatch.setattr("kvcover.sim.tiers.load_tier", lambda name: tier)
    done = CliRunner().invoke(explore_command, ["--tier", "connector", "--vllm", "0.33.0", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tier = FakeTier(lambda result, _time: worse(result) if result.mode == "read" else result)
    text = command(monkeypatch, tier, "--seeds", "30", "--out", str(tmp_path))
    assert "features: read tp fabric" in text
    assert "prefill: N ranks are too many; not counted as passes" in text
    assert "have none" in text.splitlines()[-1]
    (path,) = (path for path in sorted(tmp_path.iterdir()) if "differs" in path.name)
    assert f"kvcover run {path} --tier connector --vllm 0.33.0" in text
    assert load(path)["expect"]["outcome"] == "hang"
    found = json.loads(command(monkeypatch, FakeTier(), "--seeds", "30", "--json"))
    assert sum(found["skipped"].values()) == found["outcomes"]["skipped"]


def test_grid_and_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text("prefill = {tp = 2}\n")
    tier = FakeTier()
    text = command(monkeypatch, tier, "--grid", str(path), "--mode", "write")
    assert "vacuous" in text
    assert "before the budget ended" in command(monkeypatch, tier, "--grid", str(path), "--budget", "0.001")


@pytest.mark.parametrize("words", [["--shrink"], ["--jobs", "2"], ["--dask", "tcp://host:1"]])
def test_options_of_the_model_tier(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    with pytest.raises(InputError, match=words[0]):
        command(monkeypatch, FakeTier(), *words)


# -- the connector tier ------------------------------------------------------------------------------------------------


def test_most_drafts_can_run_on_the_connector_tier() -> None:
    """Without any tree: only translation, which is what refuses."""
    from kvcover.real_backend.tiers.translate import to_trial

    assert set(DRAWN) <= set(FEATURES)
    swarm, runnable = Swarm(features=DRAWN, pins=pinned(connector_tier, {}, "0.33.0")), 0
    for seed in range(200):
        draft = swarm.draft(seed, fit)
        try:
            to_trial(build(draft))
        except TierError:
            continue
        runnable += 1
        assert all(draft.get(side, {}).get("tp", 1) == 1 or draft[side].get("dp", 1) == 1 for side in ("prefill", "decode"))
    assert runnable > 100


@pytest.mark.vllm
def test_finds_a_known_fault_of_the_real_connector() -> None:
    """The canary: in 0.26.0 decode rank 1 of 2 is never written (vllm#47764), and the model says the same."""
    try:
        trees.check_machine()
        trees.find("0.26.0")
    except TierError as error:
        pytest.skip(f"NOT RUN: {error} (or set KVCOVER_TREES)")
    pins = {"prefill": {"tp": 2}, "decode": {"tp": 2}, "mode": "write", "model": "layers=2,mla=64+16"}
    swarm = Swarm(features=("prompt", "pools"), pins=pinned(connector_tier, pins, "0.26.0"))
    summary = TierExploration(connector_tier, "0.26.0").run(drafts_of(connector_tier, seed_jobs(swarm, 0, 3)))
    assert summary.outcomes == {"corrupt": 3}
    assert "told-without-data" in summary.ranked()[0].signature.kinds


def test_a_vllm_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(explore_command, ["--tier", "connector", "--vllm", "9.9.9", "--seeds", "1"])
    assert isinstance(done.exception, InputError)
    assert "9.9.9" in str(done.exception)
