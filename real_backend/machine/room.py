"""Whether this machine has room for a run: files, tasks, addresses, shared memory, loopback. Looked at before anything starts."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from kvcover.real_backend.driver.processes import HOST
from kvcover.sim.errors import TierError

# Seen with the releases from 0.24.0 to 0.33.0, and rounded up.
_FILES, _FILES_A_PEER, _FILES_OF_DRIVER = 130, 10, 6
_TASKS = 64
_ADDRESSES_MB = 3000
_SHARED_MB = 26
"""vLLM wants so much free for the queue of a TP group, though it uses little of it."""
_FILE_MB = 32
_ANSWER_S = 2.0


def check_room(ranks: int, at_once: int, cache_mb: int = 0) -> None:
    """Raise TierError if a run of so many ranks, with `at_once` ranks running in all, lacks something; raise soft limits first."""
    if lacking := next(lacks(ranks, at_once, cache_mb), None):
        raise TierError("--tier connector", *lacking)


def lacks(ranks: int, at_once: int, cache_mb: int = 0) -> Iterator[tuple[str, str]]:
    """What is missing, and what to do, one after the other."""
    files = max(_FILES + _FILES_A_PEER * ranks, 64 + _FILES_OF_DRIVER * at_once)
    if (hard := _raise_soft_limit(files)) < files:
        yield f"{ranks} ranks need {files} open files a process, and the limit is {hard}", f"ulimit -n {files}"
    tasks = _TASKS * at_once + 16
    if (free := _free_tasks()) < tasks:
        yield (
            f"{at_once} ranks need {tasks} processes and threads, and {free} may be started",
            "raise ulimit -u or the cgroup's pids.max",
        )
    megabytes = _ADDRESSES_MB + cache_mb
    if (limit := _limit_mb(resource.RLIMIT_AS)) < megabytes:
        yield f"a rank needs {megabytes} MB of addresses, and the limit is {limit} MB", "ulimit -v unlimited"
    if (limit := _limit_mb(resource.RLIMIT_FSIZE)) < _FILE_MB:
        yield f"vLLM's shared memory is a file of {_FILE_MB} MB, and the limit is {limit} MB", "ulimit -f unlimited"
    if not os.access("/dev/shm", os.W_OK):
        yield "vLLM's shared memory is in /dev/shm, which is not there or can't be written", "mount a tmpfs there"
    if (free := _free_shared_mb()) < _SHARED_MB:
        yield f"vLLM wants {_SHARED_MB} MB free in /dev/shm, and there are {free}", "docker run --shm-size 1g, or free it"

    if problem := _unreachable():
        yield f"ranks talk over {HOST}, and nothing can be reached there: {problem}", "ip link set lo up"


def _unreachable() -> str:
    """Why no socket of this machine can reach another one over loopback; empty if one can."""
    try:
        with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()[:2], _ANSWER_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _raise_soft_limit(files: int) -> int:
    """The limit of open files, raised as far as this user may if that is needed; the processes of a run inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return files
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _limit_mb(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return 1 << 40 if soft == resource.RLIM_INFINITY else soft // 1_000_000


def _free_shared_mb() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize // 1_000_000


def _free_tasks() -> int:
    """How many processes and threads this user may still start here."""
    free = [1 << 40, *_free_in_cgroups()]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not counted
        free.append(soft - sum(_tasks_of_user(os.getuid())))
    return max(0, min(free))


def _tasks_of_user(user: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if folder.stat().st_uid == user:
                    yield int((folder / "stat").read_text().rpartition(")")[2].split()[17])
            except (OSError, IndexError):
                continue


def _free_in_cgroups() -> Iterator[int]:
    """By the limits of this process's control groups, of either version, as far as they can be seen."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        top = Path("/sys/fs/cgroup/pids" if controllers else "/sys/fs/cgroup")
        own = top / path.strip("/")
        for folder in (own, *(each for each in own.parents if each.is_relative_to(top))):
            try:
                yield int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())
            except (OSError, ValueError):  # not there, or "max"
                continue
