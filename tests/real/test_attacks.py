"""A run that is killed, stopped, starved, cut short or disturbed: no traceback, nothing left behind, and no verdict of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real.attacks import Outcome, Target, attack, hold_ports, listening_of, rubbish, send, steal, throttle, use_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: needs /proc")
LONG = ["--set", "generate_ns=2000000000"]
RUN = [
    "run",
    "--tier",
    "connector",
    "--release",
    "0.33.0",
    "--prefill",
    "tp=2",
    "--decode",
    "tp=2",
    "--model",
    "layers=2,mla=64+16",
]
GOOD = "ok: every decode rank had its cells at go"
HANGS = signal.SIGHUP, signal.SIGTERM, signal.SIGINT
CODES = {signal.SIGHUP: 129, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
ROOT = os.geteuid() == 0
V1 = os.access("/sys/fs/cgroup/cpu/cpu.cfs_period_us", os.R_OK) and ROOT


@dataclass(frozen=True)
class Attack:
    """`codes` are those that it may exit with; 0 only with the right verdict. `says` is in what is printed."""

    name: str
    act: Callable[[Target], None] | None = None
    codes: tuple[int, ...] = (0, 3)
    shell: str = ""
    says: str = ""
    env: tuple[tuple[str, str], ...] = ()
    needs: bool = True


def _signals() -> list[Attack]:
    found = []
    for moment in ("importing", "forked", "running"):
        for number in (*HANGS, signal.SIGKILL):
            found.append(Attack(f"{number.name} while {moment}", send(number, "driver", moment=moment), (CODES[number],)))
    for number, word in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        for which, index in (("guard", 0), ("server", 0), *(("children", index) for index in range(6))):
            found.append(Attack(f"{which} {index} {word}", send(number, which, index)))
    found.append(Attack("all stopped", send(signal.SIGSTOP, "children", -1), (3,)))
    found.append(Attack("a scheduler stopped at the start", send(signal.SIGSTOP, "children", 3, "forked")))
    for which, index in (("children", 0), ("children", 2), ("children", -1), ("driver", 0), ("server", 0)):
        found.append(Attack(f"{which} {index} stopped for 2 s", send(signal.SIGSTOP, which, index, again_s=2.0)))
    found.append(Attack("killed as by no memory", send(signal.SIGKILL, "children", -1), (3,)))
    return found


_LONG_TMPDIR = "TMPDIR=$TMPDIR/$(printf x%.0s $(seq {})); mkdir $TMPDIR"


def _limits() -> list[Attack]:
    return [
        Attack("64 files", None, (2,), "ulimit -n 64", "open files a process, and the limit is 64"),
        Attack("128 files", None, (2,), "ulimit -n 128", "open files"),
        Attack("64 files that may be more", None, (0,), "ulimit -S -n 64", GOOD),
        Attack("2 GB of addresses", None, (2,), "ulimit -v 2000000", "MB of addresses"),
        Attack("files of 4 MB", None, (2,), "ulimit -f 4000", "shared memory is a file"),
        Attack("5 s of CPU time", None, (2, 3), "ulimit -t 5"),
        Attack("TMPDIR of 63 characters", None, (0,), _LONG_TMPDIR.format(45), GOOD),
        Attack("TMPDIR of 200 characters", None, (0,), _LONG_TMPDIR.format(182), GOOD),
        Attack("TMPDIR that is not there", None, (0,), "", GOOD, (("TMPDIR", "/no/such/folder"),)),
    ]  # fmt: skip


def _ports() -> list[Attack]:
    return [
        Attack("three bytes", rubbish(b"\xc1\xff\xfe"), (0,), says=GOOD),
        Attack("nothing", rubbish(b""), (0,), says=GOOD),
        Attack("a megabyte", rubbish(os.urandom(1 << 20)), (0,), says=GOOD),
        Attack("a web browser", rubbish(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 20), (0,), says=GOOD),
        Attack("connections that stay", rubbish(b"\xff", 40, close=False), (0,), says=GOOD),
        Attack("a ZMQ message", rubbish(b"\xc1\xff\xfe", zmq=True), (0,), says=GOOD),
        Attack("a ZMQ message of nothing", rubbish(b"", zmq=True), (0,), says=GOOD),
        Attack("an id", rubbish(b"cmpl-___prefill_addr_x", 5, zmq=True), (0,), says=GOOD),
        Attack("a prefill port taken", steal(0)),
        Attack("a decode notify port taken", steal(92)),
    ]


def _load() -> list[Attack]:
    return [
        Attack("8 busy loops", use_up(8, 20.0)),
        Attack("a twentieth of a CPU", throttle(0.05), (3,), says="too busy", needs=V1),
    ]


ATTACKS = [*_signals(), *_limits(), *_ports(), *_load()]
QUICK = {"SIGTERM while importing", "SIGHUP while running", "SIGKILL while running", "children 0 stopped", "64 files", "2 GB of addresses",
         "a ZMQ message", "TMPDIR of 63 characters"}  # fmt: skip


def check(outcome: Outcome, codes: tuple[int, ...], says: str = "") -> None:
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code in codes, outcome.text
    assert says in outcome.text
    assert outcome.left == []
    assert outcome.code != 0 or GOOD in outcome.text
    assert outcome.code == 0 or "coverage" not in outcome.text


@pytest.mark.vllm
@pytest.mark.parametrize(
    "attempt",
    [pytest.param(each, id=each.name, marks=() if each.name in QUICK else pytest.mark.slow) for each in ATTACKS],
)
def test_an_attack_leaves_no_verdict_and_nothing_else(attempt: Attack, trees: Path, tmp_path: Path) -> None:
    if not attempt.needs:
        pytest.skip("NOT RUN: needs root and control groups of version 1")
    check(attack([*RUN, *LONG], attempt.act, tmp_path, shell=attempt.shell, env=dict(attempt.env)), attempt.codes, attempt.says)


@pytest.mark.vllm
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "127.0.0.2", "::"])
def test_ports_that_others_hold_on_any_address_are_seen_before_the_run(address: str, trees: Path, tmp_path: Path) -> None:
    with hold_ports(address, socket.AF_INET6 if ":" in address else socket.AF_INET):
        check(attack(RUN, None, tmp_path), (2,), "128 in a row are free")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not ROOT, reason="NOT RUN: needs root")
@pytest.mark.parametrize(
    ("mounts", "codes"),
    [("-o size=20m tmpfs /dev/shm", (2,)), ("-o size=8m tmpfs /tmp", (0,)), ("-o size=60m tmpfs /dev/shm", (0,))],
)
def test_small_disks(mounts: str, codes: tuple[int, ...], trees: Path, tmp_path: Path) -> None:
    kvcover = f"{sys.executable} -m kvcover {' '.join(RUN)}"
    done = attack(["--version"], None, tmp_path, shell=f"unshare -m sh -c 'mount -t tmpfs {mounts} && {kvcover}'; exit $?")
    check(done, codes)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("release", "mode"),
    [("0.33.0", "write"), *(pytest.param("0.24.0", mode, marks=pytest.mark.slow) for mode in ("write", "read"))],
)
def test_a_run_listens_on_loopback_only(release: str, mode: str, trees: Path, tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def look(target: Target) -> None:
        while not target.over.is_set():
            seen.update(listening_of(target.marker))

    arguments = [*RUN[:3], "--release", release, "--set", f"mode={mode}", *RUN[5:], *LONG]
    done = attack(arguments, look, tmp_path)
    assert done.code == 0 and done.left == []
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

EXPLORE = ["explore", "--seeds", "100000", "--jobs", "3", "--release", "0.33.0"]


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
    done = attack(EXPLORE, when_it_works(number), tmp_path)
    assert (done.code, done.left) == (CODES[number], [])
    assert "Traceback" not in done.text


def test_a_killed_worker_is_trouble_of_the_machine(tmp_path: Path) -> None:
    done = attack(EXPLORE, when_it_works(signal.SIGKILL, "worker"), tmp_path)
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
