"""Child processes with pipes: forked after vLLM is imported and configured, so that each starts in milliseconds."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from real_backend.vllm_setup import HOST, Ports

_PR_SET_PDEATHSIG = 1
_PORTS_A_RUN = 128
_FIRST_PORT, _LAST_PORT = 10_000, 30_000  # below the range that outgoing connections draw from


class Child:
    """A forked process and its pipes. `steps` carries work, `questions` what may be asked while it works."""

    def __init__(self, name: str, body: Callable[..., None], arguments: tuple[Any, ...], log: Path, *, ask: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.name, self._asks, self._log = name, ask, log
        self.steps, steps_end = context.Pipe()
        ends: list[Connection] = [steps_end]
        if ask:
            self.questions, questions_end = context.Pipe()
            ends.append(questions_end)
        self._process = context.Process(target=_run, args=(body, (*arguments, *ends), log), daemon=True)
        self._process.start()
        for end in ends:
            end.close()

    def begin(self, method: str, *arguments: Any) -> None:
        """Start one piece of work; `result` has what comes of it."""
        self._send(self.steps, method, arguments)

    def result(self) -> Any:
        """Wait for what `begin` started, without limit. Raises RuntimeError if the process is gone."""
        return self._receive(self.steps)

    def call(self, method: str, *arguments: Any) -> Any:
        """Do one piece of work and wait for its result, without limit."""
        self.begin(method, *arguments)
        return self.result()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask something that needs no step to be over."""
        self._send(self.questions, method, arguments)
        return self._receive(self.questions)

    def _send(self, pipe: Connection, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            pipe.send((method, arguments))
        except OSError as error:
            raise RuntimeError(f"process {self.name} died; see {self._log}") from error

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"process {self.name} died; see {self._log}") from error

    def kill(self) -> None:
        """End the process now. Its sockets close with it."""
        self._process.kill()
        self._process.join()
        self.steps.close()
        if self._asks:
            self.questions.close()


def _run(body: Callable[..., None], arguments: tuple[Any, ...], log: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.flush()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    body(*arguments)


@contextmanager
def reserve_ports() -> Iterator[tuple[Ports, Ports]]:
    """Hold port ranges for a prefill and a decode engine, with room for dials that miss.

    A dial to a port of these ranges that no rank binds meets nothing, as it should. Runs at the same time get different
    ranges: the last port of each is kept bound. Raises OSError if nothing is free.
    """
    windows = (_LAST_PORT - _FIRST_PORT) // _PORTS_A_RUN
    start = int.from_bytes(os.urandom(2), "little")
    for attempt in range(windows):
        first = _FIRST_PORT + (start + attempt) % windows * _PORTS_A_RUN
        guard = socket.socket()
        try:
            guard.bind((HOST, first + _PORTS_A_RUN - 1))
            guard.listen(1)
            for port in range(first, first + _PORTS_A_RUN - 1):
                _check_free(port)
        except OSError:
            guard.close()
            continue
        with guard:
            yield Ports(first, first + 32, first + 120), Ports(first + 64, first + 92, first + 121)
        return
    raise OSError("no free range of ports for a run")


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
