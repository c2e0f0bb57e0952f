"""`kvcover doctor` on made-up machines, and on this one."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from kvcover.real_backend.machine import doctor
from kvcover.real_backend.machine.doctor import Look, Place, examine, lacking, parse_peer
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.real_backend.machine.imports import broken
from kvcover.real_backend.machine.trees import Tree
from kvcover.sim.errors import InputError
from tests.real.made_up_trees import hash_made_up, made_up_tree


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def mi300(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that the hardware tier needs."""
    write(tmp_path, "opt/rocm/.info/version", "7.0.2-56\n")
    write(tmp_path, "dev/kfd", "")
    write(tmp_path, "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\ngfx_target_version 0\n")
    for node in range(1, 9):
        write(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}/properties", "simd_count 1216\ngfx_target_version 90402\n")
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1\n")
    versions = {"amd-mori": "1.2.3.post1", "vllm": "0.33.0+rocm700", "torch": "2.9.1+rocm7.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    write(tmp_path, "torch/version.py", "__version__ = '2.9.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n")
    torch = type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})
    monkeypatch.setattr(doctor, "find_spec", lambda _name: torch)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def line(lines: list[Look], name: str) -> Look:
    return next(each for each in lines if each.name == name)


def test_a_machine_with_everything_can_run_the_hardware_tier(mi300: Path) -> None:
    lines = examine(Place(mi300))
    assert lacking(lines, "hardware") == []
    assert line(lines, "GPU").text == "8 × gfx942"
    assert line(lines, "RDMA").text == "mlx5_0/1 ACTIVE 400 Gb/sec (4X NDR)"
    assert "HIP 7.0.51831" in line(lines, "torch for ROCm").text


@pytest.mark.parametrize(
    ("path", "text", "name", "said"),
    [
        ("opt/rocm/.info/version", "6.4.1", "ROCm", "6.4.1"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN", "RDMA", "no link is up"),
        ("torch/version.py", "hip: Optional[str] = None", "torch for ROCm", "not built for ROCm"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(mi300: Path, path: str, text: str, name: str, said: str) -> None:
    write(mi300, path, text)
    short = lacking(examine(Place(mi300)), "hardware")
    assert [each.name for each in short] == [name]
    assert said in short[0].text
    assert short[0].how


def test_another_gpu_is_not_enough(mi300: Path) -> None:
    for node in range(1, 9):
        write(mi300, f"sys/class/kfd/kfd/topology/nodes/{node}/properties", "gfx_target_version 90010\n")
    assert line(examine(Place(mi300)), "GPU").text == "8 × gfx90a: not gfx942 or gfx950"


@pytest.mark.parametrize(("target", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")])
def test_the_kernel_s_numbers_for_architectures(target: int, name: str) -> None:
    assert doctor._gfx(target) == name


def test_xgmi_needs_no_nic(mi300: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(mi300, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (8 << 20, 8 << 20))
    assert {each.name for each in lacking(examine(Place(mi300)), "hardware")} == {"RDMA", "memlock"}
    assert lacking(examine(Place(mi300, transport="xgmi")), "hardware") == []


@pytest.mark.parametrize(
    ("mori", "vllm", "state"),
    [
        ("1.1.0", "0.33.0", "missing"),
        ("1.2.4", "0.33.0", "ok"),
        ("1.1.0", "0.27.1+rocm700", "ok"),
        ("1.2.4", "0.99.0", "ok"),
        (None, "0.33.0", "unknown"),
    ],
)
def test_mori_is_as_new_as_its_vllm_wants(
    mi300: Path, monkeypatch: pytest.MonkeyPatch, mori: str | None, vllm: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "_version", {"amd-mori": mori, "vllm": vllm, "torch": "2"}.get)
    assert line(examine(Place(mi300)), "mori").state == state


@pytest.mark.parametrize(("scope", "state"), [("0", "ok"), ("1", "ok"), ("3", "missing"), ("x", "unknown")])
def test_yama(tmp_path: Path, scope: str, state: str) -> None:
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", scope)
    assert line(examine(Place(tmp_path)), "ptrace scope").state == state


def test_yama_2_lets_root_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "2")
    for user, state in ((0, "ok"), (1000, "missing")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert line(examine(Place(tmp_path)), "ptrace scope").state == state


def test_trees_are_found_by_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVCOVER_TREES", str(tmp_path / "trees"))
    assert line(examine(Place(tmp_path)), "vLLM trees").state == "missing"
    (tmp_path / "trees/0.33.0/vllm/distributed/kv_transfer/kv_connector/v1/moriio").mkdir(parents=True)
    assert line(examine(Place(tmp_path)), "vLLM trees").text == "0.33.0"


def test_confirm_needs_two_connectors_and_run_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_made_up(monkeypatch)
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    monkeypatch.setattr(doctor, "installed", lambda: Tree(None, "0.27.0", "installed", tuple(KNOWN["0.27.0"].items())))
    asked = Place(tmp_path, purpose="confirm")
    made_up_tree(tmp_path / "cache/vllm/0.27.0", "0.27.0", "0.27.0")
    assert (line(examine(asked), "two vLLMs").state, line(examine(asked), "two vLLMs").text) == ("missing", "0.27.0")
    assert "two vLLMs" not in {each.name for each in examine(Place(tmp_path))}
    assert {"two vLLMs"} <= {each.name for each in lacking(examine(asked), "hardware")}
    made_up_tree(tmp_path / "cache/vllm/0.26.0", "0.26.0", "0.26.0")
    assert (line(examine(asked), "two vLLMs").state, line(examine(asked), "two vLLMs").text) == ("ok", "0.26.0, 0.27.0")


@pytest.mark.parametrize(("code", "said"), [
    ("raise ImportError('libhidden.so.7: cannot open')", "made_up: ImportError: libhidden.so.7"),
    ("import os; os._exit(0)", "exit code 0"),
    ("", ""),
])  # fmt: skip
def test_what_is_installed_and_can_not_be_imported_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    write(tmp_path, "made_up/__init__.py", code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "NAMES", ("made_up", "not_there_at_all"))
    found = line(examine(Place(tmp_path, imports=True)), "imports")
    assert (found.state, said in found.text) == ("missing" if said else "ok", True)
    assert (found in lacking([found], "connector")) == bool(said)


def test_a_device_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_DEVICE", "cdua")
    (said,) = broken(("json",))
    assert "KVCOVER_DEVICE: 'cdua'" in said


def test_what_the_tier_does_without_is_no_advice(mi300: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the hardware tier in an image must not be told to install the connector extra over it."""
    monkeypatch.setattr(doctor, "_version", {"amd-mori": "1.2.4", "vllm": "0.33.0"}.get)
    extra, mori = (line(examine(Place(mi300)), name) for name in ("connector extra", "mori"))
    assert "pip install" in extra.line("connector")
    assert "pip" not in extra.line("hardware") and extra.line("hardware").endswith("→ the hardware tier does without")
    assert mori.line("hardware") == f"ok       mori             {mori.text}"


def test_a_peer_that_listens_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = f"127.0.0.1:{listener.getsockname()[1]}"
        assert line(examine(Place(peer=peer)), "peer").state == "ok"
    gone = line(examine(Place(peer=peer)), "peer")
    assert (gone.state, gone in lacking([gone], "connector")) == ("missing", True)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_a_peer_is_host_and_port(text: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        parse_peer(text)


def test_a_check_that_fails_is_unknown_and_never_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken(_place: Place) -> list[Look]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(doctor, "CHECKS", (_broken,))
    (found,) = examine(Place())
    assert (found.name, found.state) == ("broken", "unknown")
    assert lacking([Look("x", "unknown", "", "", ("hardware",))], "hardware")


def test_what_is_missing_says_how_to_get_it() -> None:
    assert [each.name for each in examine(Place()) if each.state != "ok" and not each.how] == []


def test_the_command_is_quick_and_says_whether_the_tier_can_run() -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvcover", "doctor", "--tier", "model", "--json"], capture_output=True, text=True, check=False
    )
    assert time.monotonic() - started < 3
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tier"], report["ready"]) == ("model", True)
    assert {"connector extra", "GPU", "RDMA", "memlock"} <= {each["name"] for each in report["lines"]}


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="there is an AMD GPU")
def test_without_a_gpu_the_hardware_tier_can_t_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcover", "doctor", "--tier", "hardware"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "GPU" in done.stdout.splitlines()[-1]
    assert metadata.version("kvcover")


def test_a_look_that_failed_is_lacking_wherever_something_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def _trees(_place: Place) -> list[Look]:
        raise RuntimeError("no home")

    monkeypatch.setattr(doctor, "CHECKS", (_trees,))
    for tier in ("connector", "hardware"):
        assert [each.text for each in lacking(examine(Place()), tier)] == ["the check failed: RuntimeError: no home"]
    assert not lacking(examine(Place()), "model")
