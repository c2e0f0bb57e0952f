"""docs/ci.md does what it says: its commands, as they stand there, in a working copy of vLLM with one bad line and without."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import kvcover
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.machine import trees
from kvcover.sim.errors import TierError
from tests.real.linked_tree import linked_tree

PAGE = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
MAPPING = f"{MORIIO_FOLDER}/moriio_tp_mapping.py"
RIGHT = "tp_rank = producer_tp_rank * ratio + j"
WRONG = "tp_rank = producer_tp_rank * ratio"  # all that fans out goes to the first decode rank of its group
GIT = {f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
INSTALLS = ("pip install", "kvcover vllm add")  # what this machine has already
LIMIT_S = 900.0


def section(title: str) -> str:
    """The text under a heading of the page."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(title: str) -> list[str]:
    """The lines of a section's shell blocks, but for those that install."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section(title), re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(INSTALLS)]


def job_commands() -> list[str]:
    """What the steps of the GitHub job run, but for what they install."""
    steps = re.findall(r"^        run: \|\n((?: {10}.*\n)+)", section("GitHub Actions"), re.MULTILINE)
    lines = [line.strip() for step in steps for line in step.splitlines()]
    return [line for line in lines if not line.startswith(INSTALLS)]


class Shell:
    """Runs commands in a working copy, with a `kvcover` on the path."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self.copy = copy
        shim = folder / "bin" / "kvcover"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvcover "$@"\n')
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
        links = str(Path(str(kvcover.__file__)).parents[1])
        path = os.pathsep.join([str(shim.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, **GIT, "PATH": path, "PYTHONPATH": links}

    def __call__(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line], cwd=self.copy, env=self.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )

    def must(self, line: str) -> str:
        done = self(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def commit(self, text: str) -> str:
        self.must("git add -A && git commit -q --allow-empty -m " + text)
        return self.must("git rev-parse HEAD").strip()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A git repository with a tree of 0.33.0: branch `stock`, and `bad` with one bad line."""
    try:
        trees.check_machine()
        trees.find("0.33.0")
    except TierError as error:
        pytest.skip(f"NOT RUN: {error} (or set KVCOVER_TREES)")
    folder = tmp_path_factory.mktemp("ci")
    shell = Shell(folder, linked_tree(folder / "vllm", "0.33.0", MAPPING))
    (shell.copy / ".gitignore").write_text("__pycache__\n*.json\n*.xml\n")
    shell.must("git init -q -b stock")
    shell.commit("stock")
    shell.must("git checkout -q -b bad")
    file = shell.copy / MAPPING
    assert file.read_text().count(RIGHT) == 1
    file.write_text(file.read_text().replace(RIGHT, WRONG))
    shell.commit("one-bad-line")
    return shell


def verdicts(path: Path) -> dict[str, str]:
    suite = ET.parse(path).getroot()[0]
    return {case.attrib["name"]: next((inner.tag for inner in case if inner.tag != "system-out"), "passed") for case in suite}


def test_the_job_runs_the_gate_and_nothing_else() -> None:
    (line,) = job_commands()
    assert line.startswith("kvcover matrix --tier connector --vllm . ") and "--baseline 0.33.0" in line and "--junit" in line


@pytest.mark.vllm
@pytest.mark.parametrize("branch", ["stock", "bad"])
def test_the_job_fails_a_branch_with_one_bad_line_and_passes_the_stock_tree(shell: Shell, branch: str) -> None:
    shell.must(f"git checkout -q {branch}")
    (line,) = job_commands()
    done = shell(line)
    told = verdicts(shell.copy / "gate.xml")
    if branch == "stock":
        assert done.returncode == 0, done.stdout + done.stderr
        assert {name for name, tag in told.items() if tag == "skipped"} == {"read P1→D2", "read P2→D1"}, "they crash in both"
        assert sorted(told.values()) == ["passed"] * 6 + ["skipped"] * 2
    else:
        assert done.returncode == 1, done.stdout + done.stderr
        assert {name for name, tag in told.items() if tag == "failure"} == {"write P1→D2"}, "the only pairing that fans out"
        assert "worse: write P1→D2: outcome ok → " in done.stdout


@pytest.mark.vllm
def test_bisect_finds_the_bad_line(shell: Shell) -> None:
    shell.must("git checkout -q -B long stock")
    good = shell.commit("harmless-1")
    shell.must("git checkout -q bad -- . ")
    guilty = shell.commit("guilty")
    bad = [shell.commit(f"harmless-{number}") for number in (2, 3)][-1]
    baseline, start, bisect, reset = commands("Which commit did it")
    shell.must(baseline)
    shell.must(start.replace("BAD", bad).replace("GOOD", good))
    assert f"{guilty} is the first bad commit" in shell.must(bisect)
    shell.must(reset)


@pytest.mark.vllm
def test_an_exported_test_passes_on_the_tree_that_is_right(shell: Shell) -> None:
    shell.must("git checkout -q stock")
    for line in commands("A test for vLLM's own tree"):
        shell.must(line)
    done = shell("PYTHONPATH=$PYTHONPATH:. python -m pytest -p no:cacheprovider -q --rootdir . test_moriio_kvcover.py")
    assert " 1 passed" in f" {done.stdout.splitlines()[-1]}", done.stdout + done.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_the_commands_for_a_machine_of_ones_own(shell: Shell) -> None:
    shell.must("git checkout -q stock")
    for line in commands("On your machine"):
        shell.must(line)
    assert "failure" not in verdicts(shell.copy / "gate.xml").values()
