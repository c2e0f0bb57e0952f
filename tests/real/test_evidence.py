"""The folder that a run or a confirmation leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.real_backend.driver import logs
from kvcover.real_backend.evidence import folder as folders
from kvcover.real_backend.evidence.folder import keeping
from kvcover.real_backend.machine.checkout import checkout
from kvcover.sim.errors import Inconclusive, InputError
from tests.real.made_up_trees import hash_made_up, made_up_tree

SCENARIO = build({"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}})


def test_a_run_leaves_what_somebody_else_needs(tmp_path: Path) -> None:
    with keeping(str(tmp_path / "new"), "kvcover run", "model", [(SCENARIO, None)]) as kept:
        kept.add("result", run(SCENARIO))
        kept.verdict = "corrupt: it is"
    found = {file.name for file in (tmp_path / "new").iterdir()}
    assert found == {"doctor.txt", "environment.json", "logs", "result.json", "scenario.json", "summary.md"}
    assert build(json.loads((tmp_path / "new" / "scenario.json").read_text())) == SCENARIO
    told = (tmp_path / "new" / "summary.md").read_text()
    for part in (
        "**corrupt: it is**",
        "| outcome | corrupt |",
        "| D0.1 | 0.0, yes |",
        "`kvcover run --prefill tp=2",
        "- P1 dialled port 7301",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("the ranks gave no result"), "RuntimeError: the ranks"), (Inconclusive("no test"), "no test"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)  # fmt: skip
def test_a_run_that_fails_leaves_it_too(tmp_path: Path, error: BaseException, said: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "children.log").write_text("the last words\n" * 10_000)
    with pytest.raises(type(error)) as raised, keeping(str(tmp_path / "new"), "kvcover run", "model", [(SCENARIO, None)]):  # noqa: PT012
        logs.keep(work)
        raise error
    assert raised.value is error
    told = (tmp_path / "new" / "summary.md").read_text()
    assert told.startswith("**INCONCLUSIVE: ") and said in told
    (log,) = (tmp_path / "new" / "logs").iterdir()
    assert log.read_text() == "the last words\n" * 10_000
    logs.keep(work)  # nobody keeps them any more
    assert len(list((tmp_path / "new" / "logs").iterdir())) == 1


def test_the_command_leaves_it_whatever_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcover", "run", "--release", "0.26.0", "--prefill", "tp=2", "--decode", "tp=2", "--check"]
    done = subprocess.run([*command, "--keep", str(tmp_path / "new")], capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads((tmp_path / "new" / "result.json").read_text())["outcome"] == "corrupt"
    told = (tmp_path / "new" / "summary.md").read_text()
    assert told.startswith("**corrupt: ") and "$ kvcover run --release 0.26.0" in told


def test_a_run_that_is_killed_left_that_it_did_not_end(tmp_path: Path) -> None:
    code = (
        "import os; from kvcover import build; from kvcover.real_backend.evidence.folder import keeping\n"
        f"with keeping({str(tmp_path / 'new')!r}, 'kvcover run', 'model', [(build({{}}), None)]): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (tmp_path / "new" / "summary.md").read_text().startswith("**INCONCLUSIVE: it did not end**")
    assert json.loads((tmp_path / "new" / "environment.json").read_text())["kvcover"]


def test_two_sessions_are_never_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with keeping(str(tmp_path / "empty"), "kvcover run", "model", [(SCENARIO, None)]):
        pass
    before = (tmp_path / "empty" / "summary.md").read_text()
    for path in (tmp_path / "empty", tmp_path / "empty" / "summary.md", tmp_path / "no" / "such", Path("\0")):
        with pytest.raises(InputError, match="new folder"), keeping(str(path), "kvcover run", "model", [(SCENARIO, None)]):
            raise AssertionError
    assert (tmp_path / "empty" / "summary.md").read_text() == before


def test_no_secret_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    monkeypatch.setenv("KVCOVER_HOST_IP", "10.9.8.7")
    monkeypatch.setenv("VLLM_MORIIO_NUM_WORKERS", "3")
    with keeping(str(tmp_path / "new"), "kvcover run", "connector", []) as kept:
        kept.add("result", run(SCENARIO))
    text = "".join(file.read_text() for file in (tmp_path / "new").glob("*.*"))
    assert "secret" not in text and "10.9.8.7" not in text
    assert json.loads((tmp_path / "new" / "environment.json").read_text())["variables"]["VLLM_MORIIO_NUM_WORKERS"] == "3"


def test_what_a_tree_is_stands_beside_what_it_calls_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_made_up(monkeypatch)
    tree = made_up_tree(tmp_path / "copy", "0.27.0", "0.26.1.dev350+rocm723")
    (about,) = folders.surroundings([(build({}), str(tree))], "connector")["vllm"]
    assert (about["calls_itself"], about["is"], about["git"]) == ("0.26.1.dev350", "0.27.0", None)
    assert str(tmp_path) not in json.dumps(about)


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_is_told_by_commit_and_difference(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    assert checkout(tree) is None
    git(tree, "init", "-q")
    (tree / "a.py").write_text("1\n")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "x")
    clean = {"commit": git(tree, "rev-parse", "HEAD"), "diff_sha256": "", "untracked_files": 0}
    assert checkout(tree) == clean
    (tree / "a.py").write_text("2\n")
    (tree / "b.py").write_text("2\n")
    changed = checkout(tree)
    assert changed is not None and changed["commit"] == clean["commit"]
    assert (len(changed["diff_sha256"]), changed["untracked_files"]) == (64, 1)
    inner = tree / "inner"
    inner.mkdir()
    assert checkout(inner) is None  # what it lies in says nothing of it


def test_a_checkout_s_own_programs_are_not_run(tmp_path: Path) -> None:
    """A tree that somebody sent may configure programs that git would start."""
    tree, ran = tmp_path / "tree", tmp_path / "ran"
    tree.mkdir()
    git(tree, "init", "-q")
    (tree / "a.py").write_text("1\n")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "x")
    (tree / "a.py").write_text("2\n")
    for name in ("core.fsmonitor", "diff.external", "diff.x.textconv", "core.pager"):
        git(tree, "config", name, f"touch {ran}; true")
    (tree / ".gitattributes").write_text("*.py diff=x\n")
    assert checkout(tree) is not None
    assert not ran.exists()


@pytest.mark.parametrize(
    "words", [["--fault", "drop:"], ["--tier", "connector", "--override", "peer_tp=own_size"], ["--vllm", "0.27.0"]]
)
def test_bad_input_leaves_no_folder(tmp_path: Path, words: list[str]) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-m", "kvcover", "run", "--keep", str(tmp_path / "new"), *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "new").exists()
