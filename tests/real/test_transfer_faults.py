"""Every kind of transfer fault on two libraries: the stand-in `mori.io`, and one with a binding as strict as the real one's."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvcover.faults.events import STATUSES
from kvcover.real_backend.driver.trial import Trial
from kvcover.real_backend.inside.injection import TRANSFER_KINDS, Injection
from kvcover.real_backend.inside.posts import record_posts
from kvcover.real_backend.inside.vllm_setup import LOOPBACK
from kvcover.real_backend.inside.worker import Worker
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.scenario.scenario import build
from tests.real import pybind_mori

LISTS = ([0, 64], [64, 0], [64, 64])
LIMIT_MS = 5000


@dataclass
class Library:
    """A `mori`, two regions of 128 bytes in this process, and how it makes an engine and their descriptors."""

    io: Any
    new_engine: Callable[[], Any]
    describe: Callable[[str, np.ndarray[Any, Any]], Any]
    local: np.ndarray[Any, Any]
    remote: np.ndarray[Any, Any]

    def moved(self) -> int:
        """Bytes that are where they should be."""
        return int((self.local[[*range(64, 128), *range(64)]] == self.remote).sum())


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], Any], Callable[..., Any]]:
    pytest.importorskip("msgpack", reason="NOT RUN: the stand-in needs msgpack")
    monkeypatch.syspath_prepend(str(LOOPBACK))
    io: Any = importlib.import_module("mori.io")

    def new_engine() -> Any:
        engine = io.IOEngine("prefill:h:1:tp0:dp0", io.IOEngineConfig("127.0.0.1", 0))
        engine.create_backend(io.BackendType.RDMA)
        engine.register_remote_engine(io.EngineDesc("decode:h:1:tp0:dp0", "n", "n", "127.0.0.1", 1, os.getpid()))
        return engine

    return io, new_engine, lambda key, memory: io.MemoryDesc(key, 1, -1, "", memory.ctypes.data, memory.nbytes, 1)


def _strict(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], Any], Callable[..., Any]]:
    for name, module in pybind_mori.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    io: Any = sys.modules["mori.io"]
    return io, lambda: io.IOEngine(), lambda key, memory: io.MemoryDesc(key, memory.ctypes.data, memory.nbytes)


@pytest.fixture(params=["stand-in", "strict"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    for name in ("mori", "mori.io", "mori.cpp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    make = _stand_in if request.param == "stand-in" else _strict
    yield Library(*make(monkeypatch), np.arange(128, dtype=np.uint8), np.full(128, 255, dtype=np.uint8))
    for name in ("mori", "mori.io", "mori.cpp"):
        sys.modules.pop(name, None)


def trial(*faults: str) -> Trial:
    return to_trial(build({"model": "layers=1,mla=64+16", "faults": list(faults)}))


def session_of(library: Library, book: Path, fault: str) -> tuple[Any, Any]:
    """An engine, and a session on it that lets its batches pass by a fault."""
    injection = Injection(replace(trial(fault), book=book), "prefill", 0, "P0", {})
    injection.wrap_transfers()
    engine = library.new_engine()
    regions = library.describe("prefill:h:1:tp0:dp0", library.local), library.describe("decode:h:1:tp0:dp0", library.remote)
    return engine, engine.create_session(*regions)


def post(session: Any, kind: str) -> Any:
    return getattr(session, f"batch_{kind}")(*LISTS, 1)


def until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_MS / 1e3
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


both = pytest.mark.parametrize("kind", ["write", "read"])


@both
@pytest.mark.parametrize("code", STATUSES)
def test_a_failed_batch_moves_nothing(library: Library, tmp_path: Path, kind: str, code: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"fail-transfer:{kind},status={code}")
    status = post(session, kind)
    assert (status.Failed(), status.Succeeded(), status.InProgress(), status.Init()) == (True, False, False, False)
    assert status.Message() == "failed by a planned fault"
    assert engine.wait_all([status], timeout_ms=LIMIT_MS) == status.Code() == getattr(library.io.StatusCode, code)
    assert library.moved() == 0


@both
def test_a_batch_that_fails_in_part_moves_its_part(library: Library, tmp_path: Path, kind: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"partial-transfer:{kind},fraction=0.75")
    status = post(session, kind)
    assert status.Failed()
    assert engine.wait_all([status], timeout_ms=LIMIT_MS) == library.io.StatusCode.ERR_RDMA_OP
    assert library.moved() == 96


@both
def test_a_late_batch_is_in_progress_until_its_bytes_are_there(library: Library, tmp_path: Path, kind: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"delay-transfer:{kind},ms=150")
    status = post(session, kind)
    assert status.InProgress() and library.moved() == 0
    assert engine.wait_all([status], timeout_ms=10) == library.io.StatusCode.IN_PROGRESS
    assert engine.wait_all([status], timeout_ms=LIMIT_MS) == library.io.StatusCode.SUCCESS
    assert status.Succeeded() and library.moved() == 128


@both
def test_a_lost_completion_never_comes(library: Library, tmp_path: Path, kind: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"lose-completion:{kind}")
    status = post(session, kind)
    assert until(lambda: library.moved() == 128)
    assert engine.wait_all([status], timeout_ms=100) == library.io.StatusCode.IN_PROGRESS
    assert status.InProgress()


@both
def test_an_early_completion_comes_before_the_bytes(library: Library, tmp_path: Path, kind: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"early-completion:{kind},ms=150")
    status = post(session, kind)
    assert engine.wait_all([status], timeout_ms=LIMIT_MS) == library.io.StatusCode.SUCCESS
    assert status.Succeeded() and library.moved() == 0
    assert until(lambda: library.moved() == 128)


@both
def test_a_full_send_queue_takes_the_batch_when_it_is_posted_again(library: Library, tmp_path: Path, kind: str) -> None:
    engine, session = session_of(library, tmp_path / "book", f"sq-full:{kind},times=2")
    for _ in range(2):
        status = post(session, kind)
        assert status.Failed() and "SQ full" in status.Message()
    status = post(session, kind)
    assert engine.wait_all([status], timeout_ms=LIMIT_MS) == library.io.StatusCode.SUCCESS
    assert library.moved() == 128


def test_no_kind_is_left_out() -> None:
    source = Path(__file__).read_text()
    assert all(f'f"{kind}:' in source for kind in TRANSFER_KINDS)


def test_a_status_of_another_type_is_refused_as_the_binding_does(library: Library) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        library.new_engine().wait_all([SimpleNamespace(Succeeded=lambda: True)], timeout_ms=1)


def test_what_a_fault_holds_back_is_recorded_and_kept_when_it_is_posted(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library writes into a status until its batch is complete, so nobody may let go of it before."""
    placed: list[bool] = []

    def wrap_transfers(_injection: Injection) -> None:
        placed.append(hasattr(library.io.IOEngine, "posted"))
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Injection, "wrap_transfers", wrap_transfers)
        patch.setattr("kvcover.real_backend.inside.worker.Watch", lambda *_args: None)
        with pytest.raises(InterruptedError):
            Worker(trial(), cast(Any, SimpleNamespace(role="prefill", dp_rank=0)), 0, tmp_path, {}, 0.0)
    assert placed == [True]  # there before the rank puts its faults in place
    record_posts(library.io)
    _, session = session_of(library, tmp_path / "book", "early-completion:write,ms=50")
    status = post(session, "write")
    assert until(lambda: library.moved() == 128)
    (batch,) = library.io.IOEngine.posted
    assert batch.status is not status and until(batch.status.Succeeded)
