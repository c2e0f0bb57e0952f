"""The hardware tier's rank body, run by torchrun on CPU memory over the loopback; and the tier itself, which refuses that.

Not run on MI300 yet: what is real there and not here is named in docs/loopback.md.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcover import run
from kvcover.real_backend.evidence.confirm import CONFIRMED, conclude, expect, plan, read_pair
from kvcover.real_backend.inside.cells import cells_of
from kvcover.real_backend.inside.posts import record_posts
from kvcover.real_backend.machine import trees
from kvcover.real_backend.machine.doctor import Look
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.real_backend.machine.identity import number_of
from kvcover.real_backend.machine.trees import Tree
from kvcover.real_backend.tiers import hardware
from kvcover.real_backend.tiers.hardware import hardware_tier, launch, read_result, transport
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.errors import Inconclusive, InputError, TierError
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, build
from tests.real.made_up_trees import hash_made_up, made_up_tree
from tests.real.test_confirm import broken_tree
from tests.real.test_connector_tier import needs
from tests.unit.test_packaging import OTHERS, OURS, litter

LIMIT_S = 300.0
QUICK = ("--loopback-test", "--no-self-test")
NO_GPU = not os.path.exists("/dev/kfd")


def scenario(release: str, **changes: Any) -> Scenario:
    return build(
        {"release": release, "model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}, "fabric": "loopback"}
        | changes
    )


def coverage(result: Result) -> list[float | None]:
    return [rank.coverage for rank in result.by_rank]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "changes", "expected", "outcome"),
    [
        ("0.33.0", {}, [1.0, 1.0], "ok"),
        ("0.26.0", {}, [1.0, 0.0], "corrupt"),
        ("0.33.0", {"mode": "read", "model": "layers=2,kv_heads=8,head_dim=8"}, [1.0, 1.0], "ok"),
        ("0.27.0", {"prefill": {"tp": 1}, "decode": {"tp": 2}}, [1.0, 0.0], "hang"),
    ],
)
def test_the_body_under_torchrun_sees_what_the_connector_tier_sees(
    trees: Path, release: str, changes: dict[str, Any], expected: list[float], outcome: str
) -> None:
    if not (trees / release).is_dir():
        pytest.skip(f"NOT RUN: no tree of vLLM {release} in KVCOVER_TREES")
    result = launch(scenario(release, **changes), release, QUICK, LIMIT_S)
    assert (coverage(result), result.outcome) == (expected, outcome)
    backend = result.backend or {}
    assert (result.tier, backend["mori"], backend["launcher"]) == ("connector", "loopback", "torchrun")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected", "outcome", "fired"),
    [
        ("drop:remote_tp_size@prefill", [1.0, 1.0], "ok", 1),  # 0.33.0 fills in its own TP size
        ("drop-notice:write_done,to=D1", [1.0, 1.0], "hang", 1),
        ("early-completion:write,ms=300", [0.0, 0.0], "corrupt", 4),
        ("stall-rank:P1,ms=0,for=200", [1.0, 1.0], "ok", 1),
        ("fail-leg:decode", [0.0, 0.0], "failed", 1),
        ("delay-leg:decode,ms=300", [1.0, 1.0], "ok", 1),
        ("stop-at-prefill:0", [1.0, 1.0], "ok", 1),
    ],
)
def test_a_fault_of_each_class_acts_under_torchrun(
    trees: Path, fault: str, expected: list[float], outcome: str, fired: int
) -> None:
    if not (trees / "0.33.0").is_dir():
        pytest.skip("NOT RUN: no tree of vLLM 0.33.0 in KVCOVER_TREES")
    result = launch(scenario("0.33.0", faults=[fault]), "0.33.0", QUICK, LIMIT_S)
    assert (coverage(result), result.outcome) == (expected, outcome)
    assert [each.fired for each in result.faults] == [fired]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_users_modules_are_not_those_of_the_ranks(trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts its ranks with `-m`, which puts the current folder first unless it is told not to."""
    if not (trees / "0.26.0").is_dir():
        pytest.skip("NOT RUN: no tree of vLLM 0.26.0 in KVCOVER_TREES")
    monkeypatch.chdir(litter(tmp_path, (*OURS, *OTHERS, "torch.py", "vllm.py", "zmq.py")))
    assert coverage(launch(scenario("0.26.0"), "0.26.0", QUICK, LIMIT_S)) == [1.0, 0.0]


@pytest.mark.vllm
@pytest.mark.slow
def test_torchrun_by_hand_minds_no_module_called_as_ours(trees: Path, tmp_path: Path) -> None:
    """As README says to start it over several machines, where a folder may hold a `faults.py` or a `sim`."""
    if not (trees / "0.26.0").is_dir():
        pytest.skip("NOT RUN: no tree of vLLM 0.26.0 in KVCOVER_TREES")
    given, written = tmp_path / "scenario.json", tmp_path / "result.json"
    given.write_bytes(msgspec.json.encode(scenario("0.26.0")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "kvcover.real_backend.tiers.torchrun", str(given), "-o", str(written), "--vllm", "0.26.0", *QUICK]
    ours = litter(tmp_path, [name for name in OURS if not name.startswith("mori")])
    subprocess.run(command, cwd=ours, capture_output=True, timeout=LIMIT_S, check=False)
    assert coverage(read_result(written)) == [1.0, 0.0]


@pytest.mark.vllm
@pytest.mark.slow
def test_two_nodes_of_torchrun_meet(trees: Path, tmp_path: Path) -> None:
    """Two agents, one with prefill's ranks and one with decode's, as on two machines; the session's own cases are between them."""
    if not (trees / "0.33.0").is_dir():
        pytest.skip("NOT RUN: no tree of vLLM 0.33.0 in KVCOVER_TREES")
    given, written = tmp_path / "scenario.json", tmp_path / "result.json"
    given.write_bytes(msgspec.json.encode(scenario("0.33.0")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    body = ["-m", "kvcover.real_backend.tiers.torchrun", str(given), "-o", str(written), "--vllm", "0.33.0", "--loopback-test"]
    agents = [
        subprocess.Popen([*command, "--node-rank", str(node), *body], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for node in range(2)
    ]
    try:
        assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.terminate()
    result = read_result(written)
    assert coverage(result) == [1.0, 1.0]
    assert (result.backend or {})["self_test"].startswith("passed: a good case is ok, one wrong byte is seen")


@pytest.mark.vllm
@pytest.mark.slow
def test_two_sessions_of_two_releases_are_confirmed(trees: Path, tmp_path: Path) -> None:
    """As two images on MI300 are compared, from the scenario file to the verdict."""
    needs("0.26.0", "0.27.0")
    files = []
    for release in ("0.26.0", "0.27.0"):
        result = launch(scenario(release, router="toy-proxy 0.27.0"), release, ("--loopback-test",), LIMIT_S)
        files.append(tmp_path / f"{release}.json")
        files[-1].write_text(result.to_json())
    before, after = read_pair(*map(str, files))
    done = conclude(before, after, expect(before, None, None))
    assert (done.verdict, "as the model of 0.26.0 says" in done.reason) == (CONFIRMED, True)
    assert (before.backend or {})["self_test"].startswith("passed: a good case is ok, one wrong byte is seen")


@pytest.mark.vllm
@pytest.mark.slow
def test_a_connector_that_can_t_do_the_simplest_transfer_gives_no_result(trees: Path, tmp_path: Path) -> None:
    needs("0.27.0")
    line = "        return self.connector_worker.get_finished()"
    tree = broken_tree(tmp_path, "0.27.0", "moriio_connector.py", line)
    with pytest.raises(Inconclusive, match="self-test did not pass: the good case"):
        launch(scenario("0.27.0"), str(tree), ("--loopback-test",), LIMIT_S)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("late-rank:D1,ms=50", "late-rank can't be injected on the hardware tier"),
        ("stall-rank:P0,ms=0,for=50", "P0 leads the run here"),
    ],
)
def test_a_fault_that_torchrun_cannot_bear_is_refused_there_too(trees: Path, fault: str, said: str) -> None:
    """Over several nodes torchrun is started by hand, and no tier has looked at the scenario before."""
    with pytest.raises(TierError, match=rf"faults\[0\]: {said}"):
        launch(scenario("0.33.0", faults=[fault]), "0.33.0", QUICK, LIMIT_S)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_wrong_number_of_processes_is_one_line(trees: Path, tmp_path: Path) -> None:
    given, written = tmp_path / "scenario.json", tmp_path / "result.json"
    given.write_bytes(msgspec.json.encode(scenario("0.33.0")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "kvcover.real_backend.tiers.torchrun", str(given), "-o", str(written), "--vllm", "0.33.0", "--loopback-test"]
    subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    with pytest.raises(TierError, match="1 processes for 4 ranks; start 4 in all"):
        read_result(written)


@pytest.mark.skipif(not NO_GPU, reason="there is an AMD GPU")
def test_without_the_hardware_the_tier_says_what_is_missing_and_runs_nothing_else() -> None:
    command = [sys.executable, "-m", "kvcover", "run", "--tier", "hardware", "--prefill", "tp=2", "--decode", "tp=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--tier hardware: can't run here: " in done.stderr
    assert "GPU (no AMD GPU)" in done.stderr


def test_the_tier_names_every_missing_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Look("RDMA", "missing", "no link", "…", ("hardware",)), Look("mori", "unknown", "which?", "…", ("hardware",))]
    monkeypatch.setattr(hardware, "examine", lambda _place: lines)
    with pytest.raises(TierError, match=r"RDMA \(no link\); mori \(which\?\)"):
        hardware_tier.run(scenario("0.33.0"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """The scenarios that would be launched on a machine that has all that the tier needs."""
    launched: list[Scenario] = []

    def launch(given: Scenario, _vllm: str, options: tuple[str, ...]) -> Result:
        assert ("--no-self-test" in options) == bool(launched)  # a session is tested once
        launched.append(given)
        own = {} if "--no-self-test" in options else {"self_test": "passed: in this double"}
        return msgspec.structs.replace(run(build({"fabric": "loopback"})), backend=own)

    monkeypatch.setattr(hardware, "check_hardware", lambda _transport: None)
    monkeypatch.setattr(hardware, "launch", launch)
    return launched


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, connector: str = "") -> None:
    """A vLLM that calls itself `version` and has the connector of a release: of the one that it names, unless said."""
    files = KNOWN.get(connector or number_of(version) or "", {})
    monkeypatch.setattr(trees, "installed", lambda: Tree(None, version, "installed", tuple(files.items())))


@pytest.mark.parametrize(
    ("version", "connector", "release", "good"),
    [
        ("0.26.0", "", "0.26.0", True),
        ("0.25.1", "", "0.25.0", True),  # two names of one connector
        ("0.27.0", "", "0.27.1", True),
        ("0.27.1.dev3", "", "0.27.0", True),  # as ROCm images have it, without what follows the +
        ("0.27.0", "", "0.26.0", False),
        ("0.26.1.dev350", "", "0.26.0", False),  # of no release: on its way from 0.26.0 to what may be another connector
        ("0.26.1.dev350", "0.26.0", "0.26.0", True),  # what it is, its files say
        ("0.26.1.dev350", "0.27.0", "0.27.0", True),
        ("0.26.0", "0.33.0", "0.26.0", False),
        ("0.27.0", "", "0.33.0", False),  # the newest is named too, even if only by default
        (None, "", "0.27.0", False),
        (None, "0.27.0", "0.27.0", True),
    ],
)
def test_the_installed_vllm_runs_only_as_the_release_that_it_is(
    monkeypatch: pytest.MonkeyPatch, runs: list[Scenario], version: str | None, connector: str, release: str, good: bool
) -> None:
    install(monkeypatch, version, connector)
    if good:
        hardware_tier.run(scenario(release))
        assert [each.release for each in runs] == [release]
    else:
        with pytest.raises(TierError, match=rf"asked for vLLM {release}, but .* is installed; .* by its folder") as error:
            hardware_tier.run(scenario(release))
        assert "\n" not in str(error.value) and runs == []


def test_every_result_of_a_session_says_how_it_was_tested(monkeypatch: pytest.MonkeyPatch, runs: list[Scenario]) -> None:
    install(monkeypatch, "0.33.0")
    results = hardware_tier.many([scenario("0.33.0"), scenario("0.33.0", seed=1)])
    assert [(each.backend or {})["self_test"] for each in results] == ["passed: in this double"] * 2


def test_two_releases_need_two_vllms(monkeypatch: pytest.MonkeyPatch, runs: list[Scenario]) -> None:
    install(monkeypatch, "0.26.0")
    with pytest.raises(TierError, match=r"asked for vLLM 0\.27\.0, but 0\.26\.0 is installed"):
        hardware_tier.run(scenario("0.26.0", decode_release="0.27.0"))
    for before, after in (("0.26.0", "0.27.0"), ("0.27.0", "0.26.0")):
        with pytest.raises(TierError, match=r"asked for vLLM 0\.27\.0, but 0\.26\.0 is installed"):
            plan({"prefill": {"tp": 2}, "decode": {"tp": 2}}, before, after, "hardware").run()
    assert runs == []  # also where the first of them could have run


def test_a_vllm_of_no_release_is_given_by_its_folder(monkeypatch: pytest.MonkeyPatch, runs: list[Scenario], tmp_path: Path) -> None:
    hash_made_up(monkeypatch)
    unknown = made_up_tree(tmp_path / "unknown", "a connector of its own", "0.26.1.dev350+rocm723")
    any_release = build({"prefill": {"tp": 2}, "decode": {"tp": 2}})
    hardware_tier.run(any_release, vllm=str(unknown))
    assert len(runs) == 1
    runs.clear()
    with pytest.raises(InputError, match=r"0\.26\.1\.dev350 .* is not the 0\.26\.0 that the scenario asks for"):
        hardware_tier.run(scenario("0.26.0"), vllm=str(unknown))
    image = made_up_tree(tmp_path / "image", "0.26.0", "0.26.1.dev350+rocm723")
    hardware_tier.run(any_release, vllm=str(image))
    assert runs.pop().release == "0.26.0"  # and its rules with it
    renamed = made_up_tree(tmp_path / "renamed", "0.33.0", "0.26.0")
    hardware_tier.run(any_release, vllm=str(renamed))
    assert runs[-1].release == "0.33.0"


@pytest.mark.parametrize(
    ("vllm", "version", "release", "good"),
    [
        (None, "0.27.0", "0.27.0", True),
        (None, "0.27.0", "0.26.0", False),
        ("installed", "0.27.0", "0.26.0", False),
        ("installed", "0.34.0.dev1", "0.33.0", True),  # the newest is what a scenario says that names none
        ("installed", None, "0.26.0", True),  # nothing says what it is but the user
        ("installed", "0.26.1.dev3", "0.27.0", False),
    ],
)
def test_each_node_refuses_a_vllm_that_its_engine_is_not_named_for(
    monkeypatch: pytest.MonkeyPatch, vllm: str | None, version: str | None, release: str, good: bool
) -> None:
    pytest.importorskip("torch", reason="NOT RUN: needs the connector extra")
    from kvcover.real_backend.tiers.torchrun import _tree

    install(monkeypatch, version)
    if good:
        assert _tree(vllm, release).version == version
    else:
        with pytest.raises(InputError, match=rf"asked for vLLM {release}|is not the {release} that the scenario asks for"):
            _tree(vllm, release)


def test_the_transport_is_rdma_or_xgmi(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport() == "rdma"
    monkeypatch.setenv("KVCOVER_TRANSPORT", "xgmi")
    assert transport() == "xgmi"
    monkeypatch.setenv("KVCOVER_TRANSPORT", "tcp")
    with pytest.raises(TierError, match="use rdma or xgmi"):
        transport()


def test_the_first_ranks_are_prefill_s() -> None:
    pytest.importorskip("torch", reason="NOT RUN: needs the connector extra")
    from kvcover.real_backend.tiers.torchrun import positions

    trial = to_trial(scenario("0.33.0", decode={"tp": 1, "dp": 2}))
    assert [(each.role, each.dp, each.tp) for each in positions(trial)] == [
        ("prefill", 0, 0),
        ("prefill", 0, 1),
        ("decode", 0, 0),
        ("decode", 1, 0),
    ]


@pytest.mark.parametrize("model", ["layers=2,mla=64+16", "layers=2,kv_heads=4,head_dim=8"])
def test_cells_on_a_device_are_graded_as_on_the_host(model: str) -> None:
    torch = pytest.importorskip("torch", reason="NOT RUN: needs the connector extra")
    from kvcover.real_backend.inside.device_cells import DeviceCells

    sizes = {"prefill": {"tp": 2, "num_blocks": 6}, "decode": {"tp": 2}}
    (host,) = cells_of(to_trial(scenario("0.33.0", model=model, block_size=4, prompt_tokens=8, **sizes)), "prefill", 0)
    device = DeviceCells(**{each.name: getattr(host, each.name) for each in fields(host)})
    flat = np.zeros(math.prod(host.memory()[0]), dtype=np.int32)
    memory = [flat, flat.copy()]
    views = [host.view(each) for each in memory]
    tensors = [device.view(torch.from_numpy(each)) for each in memory]
    for tokens in (range(3), range(3, 8)):  # two chunks, of which the first ends within a block
        device.fill(tensors[0], 0, 1, (4, 2), tokens)
        host.fill(views[1], 1, 1, (4, 2), tokens)
    views[0][0, 4, 1] += 1  # wrong
    views[1][:, 2] = 0  # missing
    views[1][-1, 5, 3, 0, 1] = 7  # stray
    for blocks in ((4, 2), (2, 4)):
        assert device.grade(tensors, 1, blocks) == host.grade(views, 1, blocks)
        assert device.changed(tensors, {4, 2}) == host.changed(views, {4, 2}) == 1
        assert device.foreign(tensors, {0}, blocks) == host.foreign(views, {0}, blocks) > device.foreign(tensors, {0, 1}, blocks)
    right = host.grade(views, 1, (4, 2))
    assert 0 < right.covered < right.cells and right.wrong > 0 and right.missing > 0


def test_what_is_posted_on_the_real_library_is_noted() -> None:
    class Session:
        def batch_write(self, *args: Any) -> str:
            return f"status of {len(args)}"

        def alive(self) -> bool:
            return True

    class Engine:
        posted: list[Any]

        def create_session(self, local: Any, remote: Any) -> Session | None:
            return Session() if local else None

    record_posts(SimpleNamespace(IOEngine=Engine))
    record_posts(SimpleNamespace(IOEngine=Engine))  # once is enough
    engine, remote = Engine(), SimpleNamespace(data=1000, engine_key="decode:h:1:tp0:dp0")
    assert engine.create_session(None, remote) is None
    session = engine.create_session(SimpleNamespace(data=100), remote)
    assert session is not None and session.alive()
    assert session.batch_write([0, 8], [16, 32], [8, 8], 1) == "status of 4"
    (batch,) = Engine.posted
    assert (batch.kind, batch.remote_engine, batch.nbytes, batch.local) == ("write", "decode:h:1:tp0:dp0", 16, 115)
    assert batch.remote_ranges == ((1016, 8), (1032, 8))
