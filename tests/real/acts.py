"""What is done to a run from outside: to its processes, their sockets, files, limits and time."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.real.attacks import FIRST, LAST, LIMIT_S, WINDOW, Target, listening_of
from tests.unit.test_launch import await_none, marked

Act = Callable[[Target], None]


def send(
    number: int, which: str, index: int = 0, moment: str = "running", *, after_s: float = 0.0, again_s: float = 0.0
) -> Act:  # fmt: skip
    """Send a signal, so long after a moment; SIGSTOP is taken back after `again_s` seconds if that is given."""

    def act(target: Target) -> None:
        target.await_moment(moment)
        target.over.wait(after_s)
        pids = target.named(which)
        for pid in pids if index < 0 else pids[index : index + 1]:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if again_s:
            target.over.wait(again_s)
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    return act


def rubbish(data: bytes, times: int = 1, zmq: bool = False, close: bool = True) -> Act:
    """Send bytes to every port of the run, as they are or as a ZMQ message."""

    def act(target: Target) -> None:
        target.await_moment("running")
        kept = []
        for address, port in listening_of(target.marker):
            if not FIRST <= port < LAST or address not in ("0100007F", "00000000"):
                continue
            for _ in range(times):
                with contextlib.suppress(OSError):
                    if zmq:
                        library: Any = importlib.import_module("zmq")
                        dealer = library.Context.instance().socket(library.DEALER)
                        dealer.connect(f"tcp://127.0.0.1:{port}")
                        dealer.send(data)
                        dealer.close(linger=500)
                    else:
                        kept.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                        kept[-1].sendall(data)
                        if close:
                            kept.pop().close()
        target.over.wait(LIMIT_S)
        for each in kept:
            each.close()

    return act


def steal(offset: int) -> Act:
    """Take a port of the run's range as soon as its driver holds that range."""

    def act(target: Target) -> None:
        while not target.over.is_set():
            held = [port for _, port in listening_of(target.marker) if FIRST <= port < LAST]
            if held:
                with socket.socket() as thief, contextlib.suppress(OSError):
                    thief.bind(("127.0.0.1", FIRST + (min(held) - FIRST) // WINDOW * WINDOW + offset))
                    thief.listen()
                    target.over.wait(LIMIT_S)
                return

    return act


def use_up(number_of_loops: int, seconds: float) -> Act:
    """Busy loops beside it."""

    def act(target: Target) -> None:
        target.await_moment("forked")
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number_of_loops)]
        target.over.wait(seconds)
        for loop in loops:
            loop.kill()
            loop.wait()

    return act


def throttle(share: float) -> Act:
    """Leave its processes a share of one CPU, by a control group of version 1."""

    def act(target: Target) -> None:
        group = Path(f"/sys/fs/cgroup/cpu/kvcover-test-{target.process.pid}")
        target.await_moment("importing")
        group.mkdir()
        try:
            while not target.named("children") and target.process.poll() is None:
                time.sleep(0.02)
            (group / "cpu.cfs_quota_us").write_text(str(int(share * int((group / "cpu.cfs_period_us").read_text()))))
            while target.process.poll() is None:
                for pid in marked(target.marker):
                    with contextlib.suppress(OSError):
                        (group / "cgroup.procs").write_text(str(pid))
                time.sleep(0.5)
        finally:
            (group / "cpu.cfs_quota_us").write_text("-1")
            await_none(target.marker)
            group.rmdir()

    return act


@contextlib.contextmanager
def hold_ports(address: str, family: int = socket.AF_INET) -> Iterator[None]:
    """Listen on one port of every range that a run could take."""
    with contextlib.ExitStack() as stack:
        for first in range(FIRST, LAST - WINDOW + 1, WINDOW):
            held = stack.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):
                held.bind((address, first + 5))
                held.listen()
        yield


def _chosen(target: Target, which: str, index: int) -> list[int]:
    """Processes of that kind: one of them, or all if the index is below 0."""
    pids = target.named(which)
    return pids if index < 0 else pids[index : index + 1]


def flap(which: str, index: int, stop_s: float, go_s: float, for_s: float) -> Act:
    """Stop it again and again, each time so shortly that a look in between may see it at work."""

    def act(target: Target) -> None:
        target.await_moment("running")
        pids, end = _chosen(target, which, index), time.monotonic() + for_s
        while time.monotonic() < end and not target.over.is_set():
            for number, pause_s in ((signal.SIGSTOP, stop_s), (signal.SIGCONT, go_s)):
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
                time.sleep(pause_s)

    return act


def freeze(which: str, index: int, for_s: float, moment: str = "running") -> Act:
    """Hold it as a container is paused: no signal, and no state that says stopped."""

    def act(target: Target) -> None:
        target.await_moment(moment)
        group = Path(f"/sys/fs/cgroup/freezer/kvcover-test-{target.process.pid}")
        group.mkdir()
        try:
            for pid in _chosen(target, which, index):
                (group / "cgroup.procs").write_text(str(pid))
            (group / "freezer.state").write_text("FROZEN")
            target.over.wait(for_s)
        finally:
            (group / "freezer.state").write_text("THAWED")
            await_none(target.marker, LIMIT_S)
            group.rmdir()

    return act


def weaken(which: str, index: int, hogs: int, how: str) -> Act:
    """Leave it what busy loops on the same CPU leave to a process that is nice, or idle."""

    def act(target: Target) -> None:
        target.await_moment("forked")
        cpu = {min(os.sched_getaffinity(0))}
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(hogs)]
        try:
            for loop in loops:
                os.sched_setaffinity(loop.pid, cpu)
            for pid in _chosen(target, which, index):
                for task in map(int, os.listdir(f"/proc/{pid}/task")):
                    os.sched_setaffinity(task, cpu)
                    if how == "idle":
                        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
                    else:
                        os.setpriority(os.PRIO_PROCESS, task, 19)
            target.over.wait(LIMIT_S)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()

    return act


def lower(which: str, index: int, limit: int, value: int, moment: str = "running") -> Act:
    """Lower a limit of a process that runs."""

    def act(target: Target) -> None:
        target.await_moment(moment)
        for pid in _chosen(target, which, index):
            resource.prlimit(pid, limit, (value, value))

    return act


def remove(moment: str) -> Act:
    """Delete the run's folder under it."""

    def act(target: Target) -> None:
        target.await_moment(moment)
        for folder in Path(target.own).glob("kvcover-*"):
            shutil.rmtree(folder, ignore_errors=True)

    return act


def drop_shared_memory(target: Target) -> None:
    """Delete the names of all shared memory that its processes have open."""
    target.await_moment("running")
    for pid in marked(target.marker):
        with contextlib.suppress(OSError):
            for name in {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}:
                if name.startswith("/dev/shm/"):
                    with contextlib.suppress(OSError):
                        os.unlink(name)


def to_local_sockets(data: bytes) -> Act:
    """Send bytes to every socket in the run's folder."""

    def act(target: Target) -> None:
        target.await_moment("running")
        for path in Path(target.own).rglob("*"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as talker:
                talker.settimeout(1)
                talker.connect(str(path))
                talker.sendall(data)

    return act


def to_any_port(data: bytes, close: bool = False) -> Act:
    """Send bytes to every port of its processes as soon as it is there, once, and stay connected unless told to close."""

    def act(target: Target) -> None:
        done: set[int] = set()
        with contextlib.ExitStack() as kept:
            while not target.over.wait(0.05):
                for _, port in listening_of(target.marker):
                    if port not in done:
                        done.add(port)
                        with contextlib.suppress(OSError):
                            talker = kept.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                            talker.sendall(data)
                            if close:
                                talker.close()

    return act


def at_work(children: int, number: int, which: str, index: int = 0, after_s: float = 0.3) -> Act:
    """Send a signal when a command, whichever, has so many ranks and schedulers."""

    def act(target: Target) -> None:
        while target.process.poll() is None and len(target.named("children")) < children:
            time.sleep(0.03)
        target.over.wait(after_s)
        for pid in _chosen(target, which, index):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    return act
