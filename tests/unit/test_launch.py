"""The one launcher: what it starts ends, whoever dies first, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcover.sim import launch
from kvcover.sim.errors import TierError

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
for _ in range(2):  # a daemon: in a session of its own, without its parent
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
os.write(1, b"up\\n")  # in one piece: others write there too
time.sleep(60)
"""
DRIVER = """
import sys, time
from pathlib import Path
from kvcover.sim import launch
launched = launch.Launched(launch.python("-c", sys.argv[1]), folder=Path(sys.argv[2]), stdout=sys.stdout.buffer)
time.sleep(60)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: what descends from a guard is found on Linux only")


def marked(marker: str) -> list[int]:
    """All processes that have a word in their environment, which they inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def await_none(marker: str, limit_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + limit_s
    while (left := marked(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def marker(tmp_path: Path) -> str:
    return f"KVCOVER_TEST_MARK={tmp_path}"


@linux
def test_all_that_came_of_a_command_ends_with_it(marker: str) -> None:
    name, _, value = marker.partition("=")
    with launch.Launched(
        launch.python("-c", STUBBORN), env=launch.environment(**{name: value}), stdout=subprocess.PIPE
    ) as stubborn:
        assert stubborn.process.stdout is not None and stubborn.process.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 10
        while len(marked(marker)) < 4 and time.monotonic() < deadline:  # guard, command and daemons
            time.sleep(0.01)
        assert len(marked(marker)) >= 4
    assert marked(marker) == []


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSEGV])
def test_it_ends_with_its_parent_however_that_dies_and_so_does_the_folder(number: int, marker: str, tmp_path: Path) -> None:
    name, _, value = marker.partition("=")
    folder = tmp_path / "kvcover-above" / "work"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    command = [sys.executable, "-c", DRIVER, STUBBORN, str(folder)]
    driver = subprocess.Popen(command, env=launch.environment(**{name: value}), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    driver.send_signal(number)
    driver.wait(20)
    driver.stdout.close()
    assert await_none(marker) == []
    assert number == signal.SIGINT or not folder.parent.exists()  # Ctrl-C unwinds: then the folder is the driver's own to delete


@linux
def test_a_killed_guard_takes_the_command_with_it(marker: str) -> None:
    name, _, value = marker.partition("=")
    with launch.Launched(["sleep", "60"], env=launch.environment(**{name: value})) as asleep:
        while len(marked(marker)) < 2:
            time.sleep(0.01)
        asleep.process.kill()
        assert await_none(marker) == []


@linux
def test_a_stopped_guard_is_ended_all_the_same(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_END_LIMIT_S", 0.3)
    name, _, value = marker.partition("=")
    with launch.Launched(["sleep", "60"], env=launch.environment(**{name: value})) as asleep:
        asleep.process.send_signal(signal.SIGSTOP)
    assert await_none(marker) == []


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -SEGV $$", -signal.SIGSEGV), ("exit 0", 0)])
def test_its_end_is_the_commands(command: str, code: int) -> None:
    with launch.Launched(
        ["sh", "-c", f"echo out; echo err >&2; {command}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        assert done.output(10.0) == ("out\n", "err\n")
        assert done.process.returncode == code


def test_a_command_that_is_not_there_says_so() -> None:
    with launch.Launched(["/no/such/program"], stderr=subprocess.PIPE) as none:
        assert none.output(10.0) == ("", "/no/such/program: No such file or directory\n")
        assert none.process.returncode == 127


def test_no_code_comes_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("os.py", "json.py", "signal.py", "select.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).write_text("open('owned', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", os.environ.get("PYTHONPATH", ""), ""]))
    child = "import json, subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'])"
    for command in (launch.python("-c", child), launch.python("-m", "json.tool", os.devnull)):
        with launch.Launched(command) as done:
            done.process.wait(20)
    assert not (tmp_path / "owned").exists()


def test_a_limit_of_processes_or_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", none_left)
    with pytest.raises(TierError, match="none can be started: Too many open files"):
        launch.Launched(["true"])


def test_a_folder_for_sockets_is_short_whatever_tmpdir_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 73)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with launch.work_folder() as work:
        assert work.is_dir() and len(str(work)) <= 40
        assert work.stat().st_mode & 0o077 == 0
    assert not work.exists() and not any(long.iterdir())


def test_a_full_disk_is_passed_by_and_if_all_are_full_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_free_bytes", lambda place: 0 if place != "/var/tmp" else 1 << 30)
    with launch.work_folder() as work:
        assert work.parent == Path("/var/tmp")
    monkeypatch.setattr(launch, "_free_bytes", lambda place: 0)
    with pytest.raises(TierError, match="/tmp has 0 MiB free"), launch.work_folder():
        pass


def test_nothing_else_starts_a_process() -> None:
    top = Path(launch.__file__).parents[1]
    sources = {path: path.read_text() for room in ("sim", "real_backend", "faults") for path in (top / room).rglob("*.py")}
    assert len(sources) > 100
    starts = ("subprocess.run(", "subprocess.Popen(", "subprocess.check", "os.system(", "os.popen(", "os.spawn", "os.posix_spawn")
    found = {path.name for path, text in sources.items() if any(start in text for start in starts)}
    assert found == {"launch.py"}
