"""Exploration: finds the bugs it was made to find, without hints; the same digest whoever runs it; nothing vacuous passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvcover import InputError, build, run
from kvcover.sim.commands.explore import explore as explore_command
from kvcover.sim.commands.replay import command as replay_command
from kvcover.sim.search.example import example_text, stored_digest
from kvcover.sim.search.explore import grid_jobs, run_jobs, seed_jobs, shrink_groups
from kvcover.sim.search.failures import Exploration, Signature, group_of
from kvcover.sim.search.features import FEATURES
from kvcover.sim.search.grid import faults_of
from kvcover.sim.search.shrink import Draft, find_once
from kvcover.sim.search.swarm import Swarm, features_of

SWARM = Swarm(features=features_of(None, full=False, faults=True))
FULL = Swarm(features=features_of(None, full=True, faults=True))
MLA = "layers=1,mla=8"


@cache
def blank_swarm() -> Exploration:
    return run_jobs(seed_jobs(SWARM, 0, 2000))


def shrunk(outcome: str, releases: Sequence[str], kind: str, mode: str) -> list[Draft]:
    """Shrunken examples of the groups that match."""
    groups = {
        key: msgspec.structs.replace(group)
        for key, group in blank_swarm().groups.items()
        if (key[0].outcome, key[0].mode) == (outcome, mode) and key[0].release in releases and kind in key[0].kinds
    }
    found = Exploration(groups=groups)
    shrink_groups(found)
    return [group.draft for group in found.groups.values()]


# -- finding power -----------------------------------------------------------------------------------------------


def test_finds_the_rank_collapse_of_0_26() -> None:
    """vllm#47764: in WRITE with equal TP above 1, with no fault at all, all but one decode rank get nothing."""
    plain = [draft for draft in shrunk("corrupt", ["0.26.0"], "wrong-peer", "write") if "faults" not in draft]
    assert any(draft["prefill"] == draft["decode"] == {"tp": 2} for draft in plain)


def test_finds_that_an_unknown_size_erases_the_dp_term() -> None:
    """Since 0.27.0: decode DP above 1 and `remote_tp_size` missing on prefill's leg, and data goes to another DP rank."""
    found = shrunk("corrupt", ["0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"], "wrong-peer", "write")
    erased = [draft for draft in found if draft.get("decode") == {"dp": 2} and "prefill" not in draft]
    assert any("drop:remote_tp_size" in fault for draft in erased for fault in draft.get("faults", ()))


def test_the_reference_is_right_or_refuses() -> None:
    features = ("read", "tp", "dp", "model", "prompt", "requests", "block-ids", "pools", "fabric", "timers", "timing")
    swarm = Swarm(features=features, pins={"release": "reference"})
    summary = run_jobs(seed_jobs(swarm, 0, 400))
    assert set(summary.outcomes) == {"ok", "refused", "recomputed"}  # READ of a prompt of one token
    assert summary.failures == 0


# -- drawing -----------------------------------------------------------------------------------------------------


def test_every_feature_is_drawn_and_every_draft_makes_sense() -> None:
    drawn: set[str] = set()
    for seed in range(300):
        drawn |= set(FULL.drawn(seed))
        build(FULL.draft(seed))
    assert drawn == set(FEATURES)
    assert "invalid" not in run_jobs(seed_jobs(FULL, 0, 300)).outcomes


def test_a_seed_draws_the_same_whatever_else_is_drawn() -> None:
    """A feature has its own stream: without it, the others draw what they drew."""
    fewer = Swarm(features=tuple(name for name in SWARM.features if name not in ("fabric", "timing")))
    for seed in range(50):
        draft = SWARM.draft(seed)
        assert draft == SWARM.draft(seed)
        assert {k: v for k, v in draft.items() if k not in ("fabric", "timing")} == fewer.draft(seed)


def test_pins_win() -> None:
    swarm = Swarm(features=FULL.features, pins={"release": "0.27.0", "prefill": {"tp": 4}, "faults": ["drop:transfer_id"]})
    for seed in range(50):
        draft = swarm.draft(seed)
        assert (draft["release"], draft["prefill"]["tp"], draft["faults"]) == ("0.27.0", 4, ["drop:transfer_id"])


# -- who runs it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 50, 1000])
def test_digest_does_not_depend_on_chunks_or_executors(chunk: int) -> None:
    alone = run_jobs(seed_jobs(SWARM, 0, 200))
    with ThreadPoolExecutor(2) as pool:
        pooled = run_jobs(seed_jobs(SWARM, 0, 200, chunk), pool, 2)
    assert pooled.digest == alone.digest
    assert pooled.outcomes == alone.outcomes
    assert pooled.groups == alone.groups


def test_other_seeds_other_digest() -> None:
    assert run_jobs(seed_jobs(SWARM, 0, 20)).digest != run_jobs(seed_jobs(SWARM, 1, 20)).digest


def test_budget_begins_nothing_new() -> None:
    summary = run_jobs(seed_jobs(SWARM, 0, 1000), budget_s=0.0)
    assert summary.stopped
    assert summary.runs < 1000


@pytest.mark.slow
def test_dask() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor: Executor = client.get_executor()
        assert run_jobs(seed_jobs(SWARM, 0, 200), executor, 4).digest == run_jobs(seed_jobs(SWARM, 0, 200)).digest


# -- what counts -------------------------------------------------------------------------------------------------


def test_vacuous_runs_are_counted_apart() -> None:
    swarm = Swarm(features=(), pins={"release": "0.27.0", "faults": ["drop:remote_tpsize"]})
    summary = run_jobs(seed_jobs(swarm, 0, 3))
    assert summary.outcomes == {"vacuous": 3}
    assert summary.groups == {}


def test_an_impossible_pin_is_counted_and_said() -> None:
    summary = run_jobs(seed_jobs(Swarm(features=(), pins={"prefill": {"num_blocks": 1}}), 0, 3))
    assert summary.outcomes == {"invalid": 3}
    assert "num_blocks" in summary.invalid


def test_groups_are_counted_once_with_the_smallest_example() -> None:
    swarm = Swarm(features=("requests",), pins={"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}})
    summary = run_jobs(seed_jobs(swarm, 0, 40))
    assert summary.outcomes == {"corrupt": 40}
    assert sum(group.count for group in summary.groups.values()) == 40
    example = summary.ranked()[0].draft
    assert example.get("requests", 1) == 1 or len(example["requests"]) == 1


# -- the grid ----------------------------------------------------------------------------------------------------


def test_grid_runs_every_key_of_every_leg() -> None:
    draft = {"release": "0.27.0", "model": MLA, "prefill": {"tp": 2}, "decode": {"tp": 2}, "mode": "write"}
    faults = faults_of(draft)
    assert len(set(faults)) == len(faults)
    for leg, size in (("prefill", 2), ("decode", 2)):
        for body in (
            "drop:remote_tp_size",
            "rename:remote_tp_size=tp_size",
            f"set:remote_tp_size={size * 2}",
            "set:transfer_id=null",
        ):
            assert f"{body}@{leg}" in faults
    assert "drop:remote_tp_size" in faults
    assert not any("#" in fault for fault in faults), "one request needs no number"
    keys = [fault for fault in faults if fault.startswith(("drop:", "set:", "rename:", "swap:", "stale:"))]
    summary = run_jobs(grid_jobs(draft, [(2, 2)], ["write"]))
    assert summary.runs == len(faults) + 1
    assert summary.outcomes.get("vacuous", 0) <= len(faults) - len(keys), "a key fault of the grid always fires"


def test_grid_tells_requests_apart() -> None:
    faults = set(faults_of({"release": "0.27.0", "model": MLA, "requests": 3}))
    drop, stale = "drop:transfer_id", "stale:transfer_id"
    assert {drop, f"{drop}@prefill", f"{drop}@prefill#0", f"{drop}@decode#1", f"{drop}@decode#1+"} <= faults
    assert {stale, f"{stale}@decode", f"{stale}@decode#1", "swap:do_remote_decode@prefill#2"} <= faults
    assert not {f"{stale}@decode#0", "swap:transfer_id", "stale:remote_tp_size"} & faults, "these would change nothing"


# -- the commands ------------------------------------------------------------------------------------------------


def explored(*words: str) -> Result:
    return CliRunner().invoke(explore_command, ["--jobs", "1", *words], catch_exceptions=False)


def test_command_says_seeds_and_options_first() -> None:
    lines = explored("--seeds", "5", "--seed-start", "3", "--release", "0.27.0").stdout.splitlines()
    assert lines[0] == "seeds 3 to 7, lite"
    assert lines[1].startswith("features: release")
    assert lines[2] == 'pinned: {"release": "0.27.0"}'
    assert lines[3].startswith("seed 3 draws")
    assert lines[-1].startswith("digest ")


def test_a_pinned_release_is_that_of_both_engines() -> None:
    assert "skew" in explored("--seeds", "1").stdout
    assert "skew" not in explored("--seeds", "1", "--release", "0.27.0").stdout
    assert "skew" in explored("--seeds", "1", "--release", "0.27.0", "--features", "skew").stdout


def test_processes_print_what_one_prints() -> None:
    assert explored("--seeds", "120").stdout == explored("--seeds", "120", "--jobs", "2").stdout


def test_check_and_json() -> None:
    sizes = ("--prefill", "tp=2", "--decode", "tp=2")
    bad = explored("--seeds", "3", "--features", "fabric", "--release", "0.26.0", *sizes, "--json", "--check")
    assert bad.exit_code == 1
    found = json.loads(bad.stdout)
    assert (found["runs"], found["failures"], found["outcomes"]) == (3, 3, {"corrupt": 3})
    assert found["groups"][0]["replay"].startswith("kvcover run ")
    assert explored("--seeds", "3", "--no-faults", "--features", "fabric,keys", "--release", "reference", "--check").exit_code == 0


def test_grid_command(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('release = "0.27.0"\nmodel = "layers=1,mla=8"\nprompt_tokens = 1\n')
    lines = explored("--grid", str(path), "--mode", "write", "--prefill", "1", "--decode", "1,2").stdout.splitlines()
    assert lines[0] == f"every single fault of {path}, write, 2 pairings"
    assert any("write P1→D2, no fault" in line for line in lines), "fan-out is not covered in 0.27.0"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--features", "fabrik"], "--features"),
        (["--release", "0.27"], "release"),
        (["--tier", "hardware"], "--tier"),
        (["--jobs", "0"], "--jobs"),
        (["--set", "fabric=\"cx8\""], "fabric"),
        (["--prefill", "tp=3", "--set", "model=\"layers=1,kv_heads=8,head_dim=8\"", "--features", "fabric"], "explore"),
    ],
)  # fmt: skip
def test_bad_input(words: list[str], place: str) -> None:
    with pytest.raises(InputError) as caught:
        explored("--seeds", "2", *words)
    assert caught.value.place == place


def replay_in_a_new_process(path: str, hash_seed: str) -> str:
    code = f"from kvcover.sim.commands.replay import command; command([{path!r}, '--json'])"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    digest: str = json.loads(done.stdout)["digest"]
    return digest


def test_examples_replay_anywhere(tmp_path: Path) -> None:
    out = tmp_path / "found"
    explored("--seeds", "150", "--out", str(out), "--shrink")
    paths = sorted(map(str, out.glob("*.toml")))
    assert paths
    for path in paths:
        if not Path(path).name.startswith("error-"):
            assert CliRunner().invoke(replay_command, [path]).exit_code == 0, path
    path = next(path for path in paths if Path(path).name.startswith("corrupt-"))
    digests = {replay_in_a_new_process(path, seed) for seed in ("0", "4711")}
    assert digests == {stored_digest(Path(path).read_text())}


def test_replay_notices_another_digest_and_another_outcome(tmp_path: Path) -> None:
    draft: dict[str, Any] = {"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}, "model": MLA}
    outcome = run(build(draft)).outcome
    text = example_text(group_of(Signature(outcome, "0.26.0", "write", ()), "seed 1", draft))
    for old, new in (("# digest ", "# digest 0"), ('"corrupt"', '"ok"')):
        path = tmp_path / "example.toml"
        path.write_text(text)
        assert CliRunner().invoke(replay_command, [str(path)]).exit_code == 0
        path.write_text(text.replace(old, new))
        changed = CliRunner().invoke(replay_command, [str(path)])
        assert changed.exit_code == 1
        assert "replay differs" in changed.stderr


def test_examples_survive_odd_strings(tmp_path: Path) -> None:
    draft: dict[str, Any] = {
        "release": "0.27.0",
        "model": MLA,
        "faults": ['set:transfer_id="é\\"#\\u0007"@prefill'],
        "router": "toy-proxy",
    }
    finding = find_once(draft)
    assert finding is not None
    path = tmp_path / "odd.toml"
    path.write_text(example_text(group_of(Signature(finding[0], "0.27.0", "write", ()), "seed 1", draft)), encoding="utf-8")
    assert CliRunner().invoke(replay_command, [str(path)]).exit_code == 0


def test_grid_of_a_list_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(f'release = "0.27.0"\nmodel = "{MLA}"\nrequests = [{{}}, {{plain = true}}]\n')
    lines = explored("--grid", str(path), "--mode", "write", "--prefill", "1", "--decode", "1").stdout.splitlines()
    assert any(line.startswith("digest ") for line in lines)


def test_a_budget_is_a_number() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcover", "explore", "--budget", "nan"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "kvcover: --budget: nan is no number of seconds; use a number such as 60\n"
