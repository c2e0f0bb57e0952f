"""Who runs an exploration: this process, some processes of this machine, or a Dask cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager

from kvcover.sim.errors import InputError, MachineError


@contextmanager
def executor(processes: int | None, dask: str | None) -> Iterator[tuple[Executor | None, int]]:
    """An executor and how many workers it has, None of processes: one a CPU; without an executor everything runs here."""
    if dask is not None:
        with _dask_executor(dask) as found:
            yield found
        return
    workers = _cpus() if processes is None else processes
    if workers == 1:
        yield None, 1
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.util import get_temp_dir

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcover.sim.search.explore"])
    sockets = (get_temp_dir(),)
    with _no_code_from_here(), ProcessPoolExecutor(workers, context, _end_with_parent, sockets) as pool:
        try:
            yield pool, workers
        except BrokenExecutor:
            raise MachineError("--jobs", "a worker process died, or none could be started", "free memory or processes") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _end_with_parent(folder: str) -> None:
    """Let this process of a pool end when the process that made the pool does, however that dies, and the folder of its sockets.

    Ctrl-C is for that one.
    """
    from multiprocessing import parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel, folder), daemon=True).start()


def _end_after(sentinel: int, folder: str) -> None:
    import shutil
    from multiprocessing.connection import wait

    wait([sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextmanager
def _no_code_from_here() -> Iterator[None]:
    """An interpreter that starts now takes no module from the current folder: the fork server would, even of `kvcover` itself."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTHONSAFEPATH")
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _cpus() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client
    except ImportError:
        raise InputError("--dask", "distributed is not installed", "pip install 'kvcover[dask]'") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise InputError("--dask", f"can't reach {address!r}: {error}", "give the scheduler's address, tcp://host:8786") from None
    with client:
        workers = sum(client.nthreads().values())
        yield client.get_executor(), max(workers, 1)
