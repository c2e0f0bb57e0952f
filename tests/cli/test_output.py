"""What reaches a terminal and a disk: no text of a file steers the one, and the umask holds on the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcover.sim.plain import harmless

RUN = ["run", "--release", "0.26.0", "--prefill", "tp=2", "--decode", "tp=2", "--model", "layers=1,mla=8"]
STEERS = "\x1b[31m\x1b]0;title\x07\x9b2J\u202e\r\x7f"


def kvcover(*arguments: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcover", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, umask=umask, encoding="utf-8")


@pytest.mark.parametrize("command", ["why", "compare", "run"])
def test_text_of_a_file_is_shown_and_not_obeyed(command: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert kvcover(*RUN, "-o", str(file)).returncode == 0
    result = json.loads(file.read_text())
    result["router"] = result["model"] = result["findings"][0]["text"] = result["replay"] = f"red{STEERS}"
    file.write_text(json.dumps(result))
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"model": "layers=1,mla=8", "router": f"x{STEERS}"}))
    arguments = {"why": ["why", str(file)], "compare": ["compare", str(file), str(file)], "run": ["run", str(scenario)]}[command]
    done = kvcover(*arguments)
    text = done.stdout + done.stderr
    assert text and not set(STEERS) & set(text) - set("[31m]0;title2J")
    assert "Traceback" not in text


def test_plain_text_stays_as_it_is_and_json_stays_json() -> None:
    text = "P1–P7 → D0 │ tab\t newline\n é 漢"
    assert harmless(text) == text
    hidden = json.dumps({"a": "\u202e\x9b"}, ensure_ascii=False)
    assert json.loads(harmless(hidden)) == json.loads(hidden) and "\u202e" not in harmless(hidden)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_result_has_the_mode_that_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    kvcover(*RUN, "-o", str(file), umask=umask)
    assert file.stat().st_mode & 0o777 == mode
    os.chmod(file, 0o640)
    kvcover(*RUN, "-o", str(file), umask=umask)
    assert file.stat().st_mode & 0o777 == 0o640, "a file that is there keeps its mode"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_folder_that_is_gone_is_one_line(safe: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    links = str(Path(str(sys.modules["kvcover"].__file__)).parents[1])
    done = subprocess.run(
        ["sh", "-c", f'rmdir "$PWD" && exec {sys.executable} -m kvcover models'],
        cwd=gone, env={**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": links}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("kvcover: current folder: can't be told")
