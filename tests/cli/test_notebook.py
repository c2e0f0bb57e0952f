"""The notebook runs from top to bottom; its own assert statements hold what it claims."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvcover

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "rank_collapse.py"
EXTRA = ("jupytext", "nbclient", "ipykernel", "matplotlib")
TIMEOUT_S = 30


@pytest.fixture
def own_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel `python3` that is this interpreter, whatever kernels the machine has, and nothing written outside `tmp_path`."""
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        pytest.skip(f"the notebook was NOT run: {', '.join(missing)} not installed; pip install 'kvcover[notebook]'")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # else the kernel draws no inline pictures
    install = [sys.executable, "-m", "ipykernel", "install", "--name", "python3", "--prefix", str(tmp_path)]
    subprocess.run(install, check=True, capture_output=True, timeout=TIMEOUT_S)


@pytest.mark.usefixtures("own_kernel")
def test_notebook_runs() -> None:
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(NOTEBOOK)
    NotebookClient(notebook, kernel_name="python3", timeout=TIMEOUT_S, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [o for o in outputs if o.output_type == "display_data" and "image/png" in o.data], "no picture was drawn"
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"], "the notebook warns"


def test_as_a_script_without_matplotlib_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    links = str(Path(str(kvcover.__file__)).parents[1])
    done = subprocess.run([sys.executable, str(NOTEBOOK)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), links])})  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "the figures need matplotlib: pip install 'kvcover[notebook]'\n")


def test_notebook_names_rows_that_were_measured() -> None:
    named = set(re.findall(r"`(0\.\d+\.\d/(?:write|read)/[^`]+)`", NOTEBOOK.read_text(encoding="utf-8")))
    measured = tomllib.loads((ROOT / "tests" / "data" / "measured.toml").read_text(encoding="utf-8"))["row"]
    assert named and named <= {row["id"] for row in measured}
