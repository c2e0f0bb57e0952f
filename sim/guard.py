"""Body of a guard: runs one command, and ends all that came of it when the command ends or the guard's parent does.

Started by `launch.py` as `python -I -S guard.py LIFE FOLDER COMMAND…`, without site and packages, so that it takes 20 ms.
LIFE is a pipe of which only the parent has the other end: a byte asks for the end, its closing says that the parent is
dead, and then FOLDER, which the parent would have deleted, goes too. The guard's exit code is the command's.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 1.5
_TRACKER = b"resource_tracker"  # of multiprocessing: it deletes shared memory when all that used it are gone
_FOLDER_START = "kvcover-"


def main() -> None:
    """Run the command of the command line."""
    life, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.set_inheritable(life, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a child leaves behind becomes a child of the guard
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = _start(command)
    _let_go_of_all_but(life, wake, woken)
    status, orphaned = _watch(child, life, wake)
    status = _end_all(child, status)
    if orphaned and folder:
        shutil.rmtree(folder, ignore_errors=True)
        above = os.path.dirname(folder)
        if os.path.basename(above).startswith(_FOLDER_START):
            with suppress(OSError):
                os.rmdir(above)
    _exit_as(status)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # not on macOS
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _let_go_of_all_but(*kept: int) -> None:
    """Pipes of the command are not the guard's: who reads from them waits for the command alone."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for name in os.listdir("/dev/fd"):
        if (number := int(name)) > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)


def _watch(child: int, life: int, wake: int) -> tuple[int | None, bool]:
    """Wait for an end: the command's status if it ended by itself, and whether the parent is dead."""
    while True:
        ready = select.select([life, wake], [], [])[0]
        if wake in ready:
            numbers = os.read(wake, 64)
            if (status := _reap(child)) is not None:
                return status, False
            if any(number != signal.SIGCHLD for number in numbers):
                return None, False
        if life in ready:
            return None, not os.read(life, 1)


def _reap(child: int) -> int | None:
    """Take in everyone who is dead; the command's status if it is."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                found = status
    return found


def _end_all(child: int, status: int | None) -> int | None:
    """End the command and all that it started: politely, then at once, those that tidy up for others last."""

    def still_there(also_trackers: bool) -> list[int]:
        nonlocal status
        status = status if (ended := _reap(child)) is None else ended
        return [pid for pid in _descendants() if also_trackers or _TRACKER not in _read(f"/proc/{pid}/cmdline")]

    if not os.path.exists("/proc/self/stat"):  # no Linux: only the command's own group can be found
        for number, pause_s in ((signal.SIGTERM, _GRACE_S if status is None else 0.0), (signal.SIGKILL, 0.1)):
            with suppress(OSError):
                os.killpg(child, number)
                _wait_while(lambda: [child] if _reap(child) is None else [], pause_s)
        return status
    _signal(still_there(False), signal.SIGTERM)
    _wait_while(lambda: still_there(False), _GRACE_S)
    for also_trackers in (False, True):
        _wait_while(lambda: still_there(True), _GRACE_S if also_trackers else 0.0)
        empty = 0
        while empty < 2:  # one that forked and ended while it was looked for has left a child
            pids = still_there(also_trackers)
            _signal(pids, signal.SIGKILL)
            empty = 0 if pids else empty + 1
            time.sleep(0.005 if pids else 0.0)
    return status


def _wait_while(anyone: Callable[[], list[int]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and anyone():
        time.sleep(0.005)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)


def _descendants() -> list[int]:
    """Everyone alive who descends from this process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 1 and fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _exit_as(status: int | None) -> None:
    """End as the command did."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if status is not None else 128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
