"""Body of a tree server: import one vLLM, then fork ranks and schedulers for a driver that talks over a pipe.

Started as `python -m kvcover.real_backend.inside.forkserver FD`. It has one thread, so that forking is safe, and it ends,
with all its children, when the driver's end of the pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.trial import Role, Trial
from kvcover.real_backend.inside import scheduler, worker
from kvcover.real_backend.inside.gpu_worker import gpu_names, leave_no_handles, serve_on
from kvcover.real_backend.inside.raising import where_it_failed
from kvcover.real_backend.inside.vllm_scheduler import import_ahead
from kvcover.real_backend.inside.vllm_setup import ConfigFactory, EngineConfig, describe, prepare

_PR_SET_PDEATHSIG = 1


class _Server:
    """What the driver may call. `run` names the children of one run."""

    def __init__(self, pipe: Connection, work: Path, gpus: int) -> None:
        self._pipe = pipe
        self._bodies = {"rank": partial(serve_on, gpus) if gpus else worker.serve, "scheduler": scheduler.serve}
        self._configs = ConfigFactory(work / "models", "cuda" if gpus else "cpu")
        self._engines: dict[tuple[str, Role, int], tuple[Trial, EngineConfig]] = {}
        self._children: dict[str, list[int]] = {}
        self._ended: dict[int, int] = {}

    def configure(self, run: str, trial: Trial, role: Role, dps: list[int], ports: Ports) -> None:
        """Build vLLM's configurations before anything is forked."""
        for dp in dps:
            self._engines[run, role, dp] = (trial, self._configs.engine(trial, role, dp, ports))
        gc.collect()
        gc.freeze()

    def fork(self, run: str, what: str, pipes: int, role: Role, dp: int, log: Path, *arguments: Any) -> int:
        """Fork one child; its ends of the pipes follow on the control pipe."""
        ends = [Connection(recv_handle(self._pipe)) for _ in range(pipes)]
        trial, config = self._engines[run, role, dp]
        pid = os.fork()
        if pid == 0:
            self._be_child(what, log, (trial, config, *arguments, *ends))
        for end in ends:
            end.close()
        self._children.setdefault(run, []).append(pid)
        return pid

    def _be_child(self, what: str, log: Path, arguments: tuple[Any, ...]) -> None:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._pipe.close()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            self._bodies[what](*arguments)
        except EOFError:
            pass  # the driver is done with it
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def status(self, pid: int) -> int | None:
        """Return how a child ended, None if it lives; a child that was just killed gets a moment to be seen dead."""
        self._reap(pid)
        return self._ended.get(pid)

    def signal(self, pid: int, number: int) -> None:
        """Send a living child a signal."""
        if self.status(pid) is None:
            os.kill(pid, number)

    def end(self, run: str) -> None:
        """Kill all children of a run."""
        for pid in self._children.pop(run, ()):
            if self.status(pid) is None:
                os.kill(pid, signal.SIGKILL)
                self._reap(pid, 0)
            self._ended.pop(pid, None)
        for key in [key for key in self._engines if key[0] == run]:
            del self._engines[key]

    def _reap(self, pid: int, options: int = os.WNOHANG) -> None:
        if pid not in self._ended:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(pid, options)
                if done:
                    leave_no_handles(pid)
                    self._ended[pid] = os.waitstatus_to_exitcode(status)


def main() -> None:
    """Import vLLM, say what it is, then serve until the driver goes."""
    pipe = Connection(int(sys.argv[1]))
    tree, work, read_abort_s, device, mori = pipe.recv()
    try:
        gpus = gpu_names() if device == "cuda" else []
        if device == "cuda" and not gpus:
            pipe.send(("no GPU", "torch sees none on this machine"))
            return
        prepare(tree, read_abort_s, device, mori)
        import_ahead()
        device_names = {"device": f"cuda: {', '.join(gpus)}"} if gpus else {}
        pipe.send(("ready", describe(tree, mori) | device_names | {"pid": os.getpid()}))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    server = _Server(pipe, work, len(gpus))
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = ("ok", getattr(server, method)(*arguments))
        except Exception as error:
            traceback.print_exc()
            answer = ("error", where_it_failed(error))
        try:
            pipe.send(answer)
        except OSError:
            break
    for run in list(server._children):
        server.end(run)
    os._exit(0)


if __name__ == "__main__":
    main()
