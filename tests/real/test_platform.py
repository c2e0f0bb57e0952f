"""The connector tier beside a GPU: NVML of a tree is made to see one, as on a machine with an NVIDIA driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcover import build
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.releases.records import RELEASES
from tests.real.linked_tree import linked_tree
from tests.real.test_connector_tier import SMALL, needs

pytestmark = pytest.mark.vllm

NVML = "vllm/third_party/pynvml.py"
ONE_GPU = """
class NVMLError(Exception): pass
def nvmlDeviceGetCount(): return 1
def __getattr__(name): return lambda *arguments: None
"""
RESOLVE = "from vllm.platforms import resolve_current_platform_cls_qualname as resolve; print(resolve())"
PREPARE = "import sys, pathlib; from kvcover.real_backend.inside.vllm_setup import prepare; prepare(pathlib.Path(sys.argv[1]), 2.0)"
INSPECT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RESOLVE!r}], check=True)"
"""As vLLM looks at a model class: in a process of its own."""


def beside_a_gpu(folder: Path, release: str) -> Path:
    tree = linked_tree(folder / "tree", release, NVML)
    (tree / NVML).write_text(ONE_GPU)
    return tree


def python(code: str, tree: Path, **environment: str) -> list[str]:
    """The lines that it prints, or the last of its error."""
    command = [sys.executable, "-P", "-c", code, str(tree)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.stdout.split() or done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("release", [name for name in RELEASES if name != "reference"])
def test_the_platform_is_the_same_whatever_the_machine_has(tmp_path: Path, release: str) -> None:
    needs(release)
    tree = beside_a_gpu(tmp_path, release)
    by_itself = python(RESOLVE, tree, PYTHONPATH=str(tree))
    assert by_itself == ["vllm.platforms.cuda.CudaPlatform"] or "vllm._C_stable_libtorch" in by_itself[0]  # asked for at once
    plain = "vllm.platforms.interface.UnspecifiedPlatform"
    assert python(f"{PREPARE}\n{RESOLVE}\n{INSPECT}", tree, VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="another") == [plain, plain]
    source = (tree / "vllm/_version.py").resolve().parents[1]
    assert python(RESOLVE, source, PYTHONPATH=str(source)) == [plain]  # and what it does on this machine, without a GPU


@pytest.mark.parametrize("release", ["0.26.0", "0.27.0", "0.33.0"])
def test_a_run_beside_a_gpu_is_a_run(tmp_path: Path, release: str) -> None:
    needs(release)
    result = connector_tier(build(SMALL), vllm=str(beside_a_gpu(tmp_path, release)))
    assert [rank.coverage for rank in result.by_rank] == ([1.0, 0.0] if release == "0.26.0" else [1.0, 1.0])
