"""What is done to a run from outside, and what must not be left of it afterwards."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcover.sim.launch import environment
from tests.unit.test_launch import await_none, marked

MARK = "KVCOVER_TEST_MARK"
LIMIT_S = 150.0
FIRST, WINDOW, LAST = 10_000, 128, 30_000


@dataclass
class Target:
    """A run under attack: `kvcover` with a marker that all its processes inherit, and a TMPDIR of its own."""

    process: subprocess.Popen[str]
    marker: str
    base: int = 0
    """The first port of the run, when it listens."""
    over: threading.Event = field(default_factory=threading.Event)
    shared: set[str] = field(default_factory=set)
    """Shared memory that its processes had: of runs beside it there may be more."""

    def named(self, which: str) -> list[int]:
        """Processes by what they are: driver, guard, server, or children (a scheduler, then its ranks, prefill first)."""
        found: dict[str, list[int]] = {"driver": [self.process.pid], "guard": [], "server": [], "children": []}
        parents = {}
        for pid in marked(self.marker):
            with contextlib.suppress(OSError):
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"guard.py") for word in words):
                    found["guard"].append(pid)
                elif b"kvcover.real_backend.inside.forkserver" in words or b"kvcover.real_backend.tiers.torchrun" in words:
                    found["children"].append(pid)
        servers = [pid for pid in found["children"] if parents[pid] in found["guard"]]
        found["server"] = servers
        found["children"] = sorted(pid for pid in found["children"] if parents[pid] in servers)
        return found[which]

    def await_moment(self, moment: str) -> None:
        """Wait until it imports vLLM, has its children, or listens."""
        while self.process.poll() is None:
            if moment == "importing" and self.named("server"):
                time.sleep(0.5)
                return
            if moment == "forked" and len(self.named("children")) >= 6:
                return
            if moment == "running" and (ports := listening_of(self.marker)) and len(ports) >= 9:
                self.base = min(port for _, port in ports if FIRST <= port < LAST)
                time.sleep(0.2)
                return
            time.sleep(0.03)


def listening() -> dict[str, tuple[str, int]]:
    """Every TCP port that is listened on: address (hexadecimal) and port by the socket's inode."""
    found = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, port = words[1].split(":")
                found[words[9]] = (address, int(port, 16))
    return found


def listening_of(marker: str) -> set[tuple[str, int]]:
    """Those of the marked processes."""
    sockets, found = listening(), set()
    for pid in marked(marker):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        found.add(sockets[inode])
    return found


@dataclass(frozen=True)
class Outcome:
    """What came of it: exit code, everything that was printed, and what was left behind."""

    code: int
    text: str
    left: list[str]


def attack(
    arguments: list[str], act: Callable[[Target], None] | None, tmp_path: Path, *, shell: str = "", cwd: Path | None = None,
    env: dict[str, str] | None = None, program: Sequence[str] = ("-m", "kvcover"),
) -> Outcome:  # fmt: skip
    """Run `kvcover ARGUMENTS`, or another program of Python's, perhaps after some shell commands, do something to it, and look
    for what is left.
    """
    with tempfile.TemporaryDirectory(prefix="atk-", dir="/tmp") as own:
        marker = f"{MARK}={own}"
        variables = environment(**{MARK: own, "TMPDIR": own, **(env or {})})
        command = [sys.executable, *program, *arguments]
        if shell:
            command = ["bash", "-c", f'{shell}; exec "$@"', "bash", *command]
        process = subprocess.Popen(
            command, env=variables, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_as_in_a_shell
        )
        target = Target(process, marker)
        threading.Thread(target=_note_shared_memory, args=(target,), daemon=True).start()
        actor = threading.Thread(target=act, args=(target,), daemon=True) if act else None
        if actor:
            actor.start()
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        finally:
            target.over.set()
            process.kill()
        if actor:
            actor.join(20)
        left = [f"process {pid}" for pid in await_none(marker)]
        left += [str(path) for path in Path(own).rglob("*") if path.name.strip("x")]  # a long TMPDIR is one of x
        left += [name for name in sorted(target.shared) if os.path.exists(name)]
        return Outcome(process.returncode, text, left)


def _as_in_a_shell() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _note_shared_memory(target: Target) -> None:
    while not target.over.wait(0.2):
        for pid in marked(target.marker):
            with contextlib.suppress(OSError):
                found = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
                target.shared |= {name for name in found if name.startswith("/dev/shm/") and "deleted" not in name}


# -- what is done ------------------------------------------------------------------------------------------------


def send(number: int, which: str, index: int = 0, moment: str = "running", again_s: float = 0.0) -> Callable[[Target], None]:
    """Send a signal; SIGSTOP is taken back after `again_s` seconds if that is given."""

    def act(target: Target) -> None:
        target.await_moment(moment)
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


def rubbish(data: bytes, times: int = 1, zmq: bool = False, close: bool = True) -> Callable[[Target], None]:
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


def steal(offset: int) -> Callable[[Target], None]:
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


def use_up(number_of_loops: int, seconds: float) -> Callable[[Target], None]:
    """Busy loops beside it."""

    def act(target: Target) -> None:
        target.await_moment("forked")
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number_of_loops)]
        target.over.wait(seconds)
        for loop in loops:
            loop.kill()
            loop.wait()

    return act


def throttle(share: float) -> Callable[[Target], None]:
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
