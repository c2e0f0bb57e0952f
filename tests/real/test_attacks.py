"""A run that is killed, stopped, starved, cut short or disturbed: no traceback, nothing left behind, and no verdict of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.real.acts import hold_ports
from tests.real.attack_table import (
    ATTACKS,
    CODES,
    CONFIRM,
    CORPUS,
    EXPLORE,
    GOOD,
    HANGS,
    KVCOVER,
    LISTENERS,
    LONG,
    QUICK,
    RUN,
    TORCHRUN,
    Attack,
)
from tests.real.attacks import Outcome, Target, attack, listening_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: needs /proc")
BAD = re.compile(r"\b(crash|hang|corrupt|leak|degraded|recomputed)\b")
"""What no run under attack may be said to be: without the attack all of them are ok."""


def check(outcome: Outcome, codes: tuple[int, ...], says: str = "", good: str = GOOD) -> None:
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code in codes, outcome.text
    assert says in outcome.text, outcome.text
    assert outcome.left == []
    if outcome.code == 0:
        assert good in outcome.text, outcome.text
    elif outcome.code > 1:
        assert len(re.findall("^kvcover: ", outcome.text, re.MULTILINE)) == 1, outcome.text


def is_whole(path: Path) -> bool:
    """Whether a file that a command was writing is all there."""
    if path.suffix == ".xml":
        return bool(list(ET.parse(path).getroot()))
    return all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())


@pytest.mark.vllm
@pytest.mark.parametrize(
    "attempt",
    [pytest.param(each, id=each.name, marks=() if each.name in QUICK else pytest.mark.slow) for each in ATTACKS],
)
def test_an_attack_leaves_no_verdict_and_nothing_else(attempt: Attack, trees: Path, tmp_path: Path) -> None:
    if not attempt.needs:
        pytest.skip("NOT RUN: needs root and control groups of version 1")
    done = attack(
        attempt.command, attempt.act, tmp_path, shell=attempt.shell, env=dict(attempt.env), cwd=tmp_path, program=attempt.program
    )
    check(done, attempt.codes, attempt.says, attempt.good)
    if attempt.command[:1] not in (CONFIRM[:1], EXPLORE[:1], CORPUS[:1]):  # what these run may well be bad
        assert not BAD.search(done.text), done.text
    assert all(is_whole(tmp_path / name) for name in attempt.whole if (tmp_path / name).exists())
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "core"))]


@pytest.mark.vllm
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "127.0.0.2", "::"])
def test_ports_that_others_hold_on_any_address_are_seen_before_the_run(address: str, trees: Path, tmp_path: Path) -> None:
    with hold_ports(address, socket.AF_INET6 if ":" in address else socket.AF_INET):
        check(attack(RUN, None, tmp_path), (2,), "128 in a row are free")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("command", "program"),
    [
        pytest.param((*RUN, *LONG), KVCOVER, id="run"),
        *(pytest.param(each, KVCOVER, id=name, marks=pytest.mark.slow) for name, each in LISTENERS.items()),
        pytest.param((), TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_run_listens_on_loopback_only(command: Sequence[str], program: Sequence[str], trees: Path, tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def look(target: Target) -> None:
        while not target.over.is_set():
            seen.update(listening_of(target.marker))

    done = attack(command, look, tmp_path, program=program, cwd=tmp_path)
    assert (done.code, done.left) == (0, []), done.text
    assert len(seen) >= 9
    assert {address for address, _ in seen} <= {"0100007F", "00000000000000000000000001000000"}


HOSTILE = ("vllm/__init__.py", "0.33.0/vllm/__init__.py", "msgspec.py", "numpy.py", "zmq.py", "torch.py", "mori.py", "sim/__init__.py",
           "sitecustomize.py", "json.py")  # fmt: skip


def hostile(folder: Path) -> Path:
    for name in HOSTILE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(folder / 'owned')!r}, 'a').write({name!r})\n")
    return folder


@pytest.mark.vllm
def test_no_code_of_the_current_folder_runs_in_a_real_run(trees: Path, tmp_path: Path) -> None:
    check(attack(RUN, None, tmp_path, cwd=hostile(tmp_path)), (0,), GOOD)
    assert not (tmp_path / "owned").exists()


# -- of exploration and vllm add ----------------------------------------------------------------------------------

EXPLORE_MODEL = ["explore", "--seeds", "100000", "--jobs", "3", "--release", "0.33.0"]


def when_it_works(number: int, which: str = "driver") -> Callable[[Target], None]:
    def act(target: Target) -> None:
        import time

        from tests.unit.test_launch import marked

        while len(marked(target.marker)) < 6 and target.process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(target.process.pid if which == "driver" else max(marked(target.marker)), number)

    return act


@pytest.mark.parametrize("number", [*HANGS, signal.SIGKILL])
def test_an_exploration_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    done = attack(EXPLORE_MODEL, when_it_works(number), tmp_path)
    assert (done.code, done.left) == (CODES[number], [])
    assert "Traceback" not in done.text


def test_a_killed_worker_is_trouble_of_the_machine(tmp_path: Path) -> None:
    done = attack(EXPLORE_MODEL, when_it_works(signal.SIGKILL, "worker"), tmp_path)
    assert (done.code, done.left) == (3, [])
    assert "Traceback" not in done.text and "a worker process died" in done.text


def test_no_code_of_the_current_folder_runs_in_an_exploration(tmp_path: Path) -> None:
    done = attack(["explore", "--seeds", "60", "--jobs", "2"], None, tmp_path, cwd=hostile(tmp_path))
    assert done.code == 0, done.text
    assert not (tmp_path / "owned").exists()


@pytest.mark.vllm
@pytest.mark.parametrize("number", [*HANGS, signal.SIGKILL])
def test_vllm_add_leaves_nothing(number: signal.Signals, trees: Path, tmp_path: Path) -> None:
    """pip waits for an index that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"

        def act(target: Target) -> None:
            connection, _ = index.accept()
            os.kill(target.process.pid, number)
            target.over.wait(60)
            connection.close()

        env = {"KVCOVER_CACHE": str(tmp_path), "PIP_INDEX_URL": url, "PIP_RETRIES": "0"}
        done = attack(["vllm", "add", "0.27.0"], act, tmp_path, env=env)
    assert (done.code, done.left) == (CODES[number], [])
    assert "Traceback" not in done.text
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == [".lock-0.27.0"]
