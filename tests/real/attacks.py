"""What is done to a run from outside, and what must not be left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcover.sim.launch import environment
from tests.unit.test_launch import await_none, marked

MARK = "KVCOVER_TEST_MARK"
LIMIT_S = 300.0
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

    @property
    def own(self) -> str:
        """Its folder for temporary files."""
        return self.marker.partition("=")[2]

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
    arguments: Sequence[str], act: Callable[[Target], None] | None, tmp_path: Path, *, shell: str = "", cwd: Path | None = None,
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
