"""Who runs what is explored: this process, processes beside it, or a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcover.sim.commands.options import whole_number
from kvcover.sim.errors import InputError

if TYPE_CHECKING:
    from concurrent.futures import Executor


@contextmanager
def workers_of(jobs: str, dask: str | None) -> Iterator[tuple[Executor | None, int]]:
    """An executor and how many workers it has; None runs everything here."""
    if dask is not None:
        with _dask_executor(dask) as found:
            yield found
        return
    workers = _cpus() if jobs == "all" else whole_number("--jobs", jobs, jobs)
    if workers < 1:
        raise InputError("--jobs", f"{workers} processes can't run anything", "use 1 or more")
    if workers == 1:
        yield None, 1
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcover.sim.search.explore"])
    with _no_code_from_here(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            yield pool, workers
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
