"""The processes of a run as their driver sees them: one server a vLLM tree, and the children that it forks.

A server imports vLLM once and forks every rank from there, so that a rank starts in milliseconds; two engines of
different releases have two servers. The driver itself never imports vLLM.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Literal

from kvcover.real_backend.driver.reports import Escaped
from kvcover.real_backend.driver.wire import Wire
from kvcover.sim import launch
from kvcover.sim.errors import MachineError, TierError

HOST = "127.0.0.1"
Device = Literal["cpu", "cuda"]
_PORTS_A_RUN = 128
_FIRST_PORT, _LAST_PORT = 10_000, 30_000  # below the range that outgoing connections draw from
_START_LIMIT_S = 240.0
_ANSWER_LIMIT_S = 30.0
_STOPPED_AFTER_S = 2.0
_LAST_WORDS_S = 5.0
_END_LIMIT_S = 2.0
MOST_RANKS = 28
"""Ranks of one engine that its range of ports has room for."""


@dataclass(frozen=True, slots=True)
class Ports:
    """First ports of an engine on its host; each rank binds base + its offset. `http` is announced, never bound.

    `secret` is what sockets of the run know each other by, if all of it is on one machine.
    """

    handshake: int
    notify: int
    http: int
    host: str = HOST
    secret: bytes = b""

    @property
    def zmq_address(self) -> str:
        """The address as a router writes it into request ids."""
        return f"host:{self.host},handshake:{self.handshake},notify:{self.notify}"

    @property
    def notices(self) -> range:
        """Ports on which the engine's ranks may listen for notices."""
        return range(self.notify, self.notify + MOST_RANKS)


def device() -> Device:
    """Whose memory caches are in: `KVCOVER_DEVICE`, cpu unless it says cuda. Raises TierError for anything else."""
    name = os.environ.get("KVCOVER_DEVICE", "cpu")
    if name == "cuda":
        return "cuda"
    if name != "cpu":
        raise TierError("KVCOVER_DEVICE", f"{name!r} is no kind of device", "use cpu or cuda")
    return "cpu"


class ProcessDied(RuntimeError):
    """A process of the run is gone, or doesn't answer: `name`, and `how`."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(f"process {name} {how}")
        self.name, self.how = name, how


class TreeServer:
    """One process that has imported one vLLM tree. `info` says what it holds; safe to use from several threads."""

    def __init__(self, tree: Path | None, work: Path, read_abort_s: float = 2.0, mori: Path | None = None) -> None:
        """Start it; `tree` None means the vLLM that is installed, `mori` None the stand-in. `await_ready` must come first."""
        self.label = str(tree) if tree else "the installed vLLM"
        self.info: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._pid = 0
        self.log = work / f"server-{os.getpid()}-{id(self):x}.log"
        self._pipe, end = multiprocessing.Pipe()
        command = launch.python("-m", "kvcover.real_backend.inside.forkserver", str(end.fileno()))
        own = launch.environment(TMPDIR=str(work))  # vLLM's sockets are there, and deleted with it
        with self.log.open("ab") as log:
            self._launched = launch.Launched(command, env=own, folder=work, pass_fds=[end.fileno()], stdout=log, stderr=log)
        end.close()
        self._process = self._launched.process
        self._close = weakref.finalize(self, _end_server, self._launched, self._pipe)
        self._pipe.send((tree, work, read_abort_s, device(), mori))

    def await_ready(self) -> None:
        """Wait until vLLM is imported. Raises TierError if it can't be."""
        if self.info:
            return
        if not self._pipe.poll(_START_LIMIT_S):
            raise TierError("--vllm", f"importing {self.label} took more than {_START_LIMIT_S:g} s", f"see {self._last_words()}")
        kind, answer = self._receive()
        if kind == "no GPU":
            raise TierError("KVCOVER_DEVICE", f"{device()}: {answer}", "leave it out to use the memory of this machine")
        if kind == "error":
            raise TierError("--vllm", f"{self.label} can't be used: {answer}", "see `kvcover vllm list` for trees that can")
        self._pid = int(answer.pop("pid"))
        self.info = answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Let the server do something. Raises TierError if it fails there or the server is gone."""
        with self._lock:
            return self._call(method, arguments)

    def fork(self, run: str, what: str, pipes: int, *arguments: Any) -> tuple[int, list[Connection]]:
        """Fork a child and return its pid and our ends of its pipes."""
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(pipes)), strict=True)
        with self._lock:
            try:
                self._pipe.send(("fork", (run, what, pipes, *arguments)))
                for end in theirs:
                    send_handle(self._pipe, end.fileno(), self._process.pid)
                kind, pid = self._receive()
            except OSError:
                raise self._gone() from None
            finally:
                for end in theirs:
                    end.close()
        if kind == "error":
            raise TierError("--tier", f"no process for {what}: {pid}", "free memory or processes")
        return pid, list(ours)

    def close(self) -> None:
        """End the server and every child of it now."""
        self._close()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, arguments))
            kind, answer = self._receive()
        except OSError:
            raise self._gone() from None
        if kind == "error":
            raise TierError(
                "--vllm", f"the harness can't drive {self.label}: {answer}", "use a release that `kvcover releases` lists"
            )
        return answer

    def _receive(self) -> tuple[str, Any]:
        try:
            while not self._pipe.poll(_STOPPED_AFTER_S):
                if is_stopped(self._pid):
                    raise MachineError(
                        "--tier", f"the process that holds {self.label} is stopped: the run says nothing", "run it again"
                    )
            answer: tuple[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        return answer

    def _gone(self) -> TierError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        how = how_it_ended(self._process.returncode)
        return MachineError("--tier", f"the process that holds {self.label} is gone ({how})", self._last_words() or "run it again")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1][:300] if lines else ""


def _end_server(launched: launch.Launched, pipe: Connection) -> None:
    pipe.close()  # it ends by itself, and helpers of its children then clear up shared memory
    with contextlib.suppress(subprocess.TimeoutExpired):
        launched.process.wait(_END_LIMIT_S)
    launched.stop()


def how_it_ended(code: int | None) -> str:
    """Say a return code, negative for a signal, in words."""
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


class Child:
    """A forked process and its pipes. `steps` carries work, `questions` what may be asked while it works."""

    def __init__(self, name: str, server: TreeServer, run: str, what: str, arguments: tuple[Any, ...], *, ask: bool) -> None:
        self.name, self._asks, self._server = name, ask, server
        self.pid, pipes = server.fork(run, what, 2 if ask else 1, *arguments)
        self.steps: Connection | Wire = pipes[0]
        self.questions: Connection | Wire = pipes[-1]
        self.planned_death = False
        """A planned fault killed it."""
        self.planned_stop = False
        """A planned fault holds it."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Start one piece of work; `result` has what comes of it."""
        self._send(self.steps, method, arguments)

    def result(self) -> Any:
        """Wait for what `begin` started, without limit. Raises ProcessDied if the process is gone."""
        return self._receive(self.steps)

    def call(self, method: str, *arguments: Any) -> Any:
        """Do one piece of work and wait for its result, without limit."""
        self.begin(method, *arguments)
        return self.result()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask something that needs no step to be over. Raises ProcessDied if no answer comes."""
        self._send(self.questions, method, arguments)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while not self.questions.poll(_STOPPED_AFTER_S):
            self.check_moving()
            if time.monotonic() > deadline:
                raise ProcessDied(self.name, f"does not answer for {_ANSWER_LIMIT_S:g} s")
        return self._receive(self.questions)

    def last_words(self) -> Any:
        """The report of one that has nothing to do; None if it doesn't answer at once."""
        self.begin("report")
        return self.result() if self.steps.poll(_LAST_WORDS_S) else None

    def check_moving(self) -> None:
        """Raise ProcessDied if something else than a planned fault has stopped the process."""
        if not self.planned_stop and is_stopped(self.pid):
            raise ProcessDied(self.name, "does not answer: it is stopped")

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._server.call("signal", self.pid, number)

    def close(self) -> None:
        """Let go of the pipes."""
        self.steps.close()
        self.questions.close()

    def _send(self, pipe: Connection | Wire, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            pipe.send((method, arguments))
        except OSError:
            raise self._died() from None

    def _receive(self, pipe: Connection | Wire) -> Any:
        try:
            while not pipe.poll(_STOPPED_AFTER_S):
                self.check_moving()
            return pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ProcessDied:
        for _ in range(25):  # its pipes close a moment before it can be waited for
            if (code := self._server.call("status", self.pid)) is not None:
                return ProcessDied(self.name, f"died: {how_it_ended(code)}")
            time.sleep(0.02)
        return ProcessDied(self.name, "closed its pipes")

    def as_raised(self, error: ProcessDied) -> Escaped:
        """Say the death as something that its engine sees."""
        return Escaped(self.name, "process", "Died", error.how)


def is_stopped(pid: int) -> bool:
    """Whether somebody holds a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


HELD = "RDTt"
"""Would run, waits for a disk or is frozen, is stopped, is looked into."""


def scheduled(pid: int) -> tuple[str, int, float]:
    """Of a process's main thread: its state, how many ns it ran, how many seconds it waited; zeros where nothing counts."""
    try:
        ran_ns, waited_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], int(ran_ns), int(waited_ns) / 1e9
    except (OSError, IndexError, ValueError):
        return "", 0, 0.0


@contextmanager
def reserve_ports() -> Iterator[tuple[Ports, Ports]]:
    """Hold port ranges for a prefill and a decode engine, with room for dials that miss.

    A dial to a port of these ranges that no rank binds meets nothing, as it should. Runs at the same time get different
    ranges: the last port of each is kept bound. Raises TierError if nothing is free.
    """
    windows = (_LAST_PORT - _FIRST_PORT) // _PORTS_A_RUN
    start = int.from_bytes(os.urandom(2), "little")
    for attempt in range(windows):
        first = _FIRST_PORT + (start + attempt) % windows * _PORTS_A_RUN
        guard = socket.socket()
        try:
            guard.bind((HOST, first + _PORTS_A_RUN - 1))  # of this machine alone, as all that listens
            guard.listen(1)
            for port in range(first, first + _PORTS_A_RUN - 1):
                _check_free(port)
        except OSError:
            guard.close()
            continue
        with guard:
            secret = os.urandom(32)
            prefill = Ports(first, first + 32, first + 120, secret=secret)
            yield prefill, Ports(first + 64, first + 92, first + 121, secret=secret)
        return
    text = f"no {_PORTS_A_RUN} in a row are free from {_FIRST_PORT} to {_LAST_PORT}"
    raise TierError("ports", text, "end what listens there, on any address")


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))  # taken if anyone has it on any address
