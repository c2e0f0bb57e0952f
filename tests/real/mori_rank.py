"""A process with one `mori.io`, and what a test asks of it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZE = 1 << 16
_LIMIT_S = 5.0
Said = tuple[str, str]
"""The code of a status, and its message."""


class Rank:
    """The test's side of it: every method of `_Body` by name."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(str(folder), end), daemon=True)
        self.process.start()
        end.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method returns; an exception comes as `TypeError: text`."""
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Tensor:
    """As much of a tensor in host memory as registering it needs."""

    is_cuda = False
    device = SimpleNamespace(type="cpu", index=None)

    def __init__(self, content: bytes) -> None:
        self.memory = ctypes.create_string_buffer(content, len(content))

    def is_contiguous(self) -> bool:
        return True

    def nelement(self) -> int:
        return len(self.memory)

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)


class _Body:
    """The rank's side: one engine at a time, with one region of SIZE bytes."""

    def __init__(self) -> None:
        from mori import cpp, io

        self.io: Any = io
        self.cpp: Any = cpp

    def open(self, key: str, content: bytes, backend: bool = True) -> tuple[bytes, bytes]:
        """Make an engine; its packed description and that of its region."""
        self.engine = self.io.IOEngine(key, self.io.IOEngineConfig("127.0.0.1", 0))
        if backend:
            settings = self.io.RdmaBackendConfig(1, -1, 1, self.io.PollCqMode.POLLING, enable_notification=False)
            self.engine.create_backend(self.io.BackendType.RDMA, settings)
        self.tensor = Tensor(content)
        self.region = self.engine.register_torch_tensor(self.tensor)
        return self.engine.get_engine_desc().pack(), self.region.pack()

    def meet(self, description: bytes) -> None:
        self.engine.register_remote_engine(self.io.EngineDesc.unpack(description))

    def forget(self, description: bytes) -> None:
        self.engine.deregister_remote_engine(self.io.EngineDesc.unpack(description))

    def pair(self, region: bytes) -> bool:
        """Whether there is a session with a region of a peer."""
        self.remote = self.io.MemoryDesc.unpack(region)
        self.session = self.engine.create_session(self.region, self.remote)
        return self.session is not None

    def post(self, kind: str, local: Any, remote: Any, sizes: Any) -> Said:
        """Post a batch and wait for its end."""
        return self._said(self._final(getattr(self.session, f"batch_{kind}")(local, remote, sizes, 1)))

    def timed(self, kind: str, local: Any, remote: Any, sizes: Any) -> tuple[float, Said]:
        start = time.monotonic()
        said = self.post(kind, local, remote, sizes)
        return time.monotonic() - start, said

    def one(self, kind: str, local: int, remote: int, size: int) -> Said:
        return self._said(self._final(getattr(self.session, kind)(local, remote, size, 1)))

    def wait(self, batches: list[tuple[list[int], list[int], list[int]]], timeout_ms: int = 2000) -> str:
        """What waiting for several reads returns."""
        wait_all = self.engine.wait_all  # before the post: the library writes into statuses that nobody keeps
        statuses = [self.session.batch_read(*lists, 1) for lists in batches]
        return str(wait_all(statuses, timeout_ms=timeout_ms).name)

    def wait_for_none_posted(self) -> tuple[str, bool]:
        start = time.monotonic()
        code = self.engine.wait_all([self.cpp.TransferStatus()], timeout_ms=2000)
        return str(code.name), time.monotonic() - start < 1.0

    def updates(self, *codes: str) -> Said:
        status = self.cpp.TransferStatus()
        for code in codes:
            status.Update(getattr(self.cpp.StatusCode, code), code.lower())
        return self._said(status)

    def deregister(self) -> None:
        self.engine.deregister_memory(self.region)

    def alive(self) -> bool:
        return bool(self.session.alive())

    def content(self, start: int, size: int) -> bytes:
        return self.tensor.memory.raw[start : start + size]

    def numbers(self) -> tuple[int, int, int, bool]:
        """Of the region, of the first two transfers, and whether the engine says which port it took."""
        first, second = (self.engine.allocate_transfer_uid() for _ in range(2))
        return self.region.id, first, second, self.engine.get_engine_desc().port > 0

    def unpack(self, kind: str, data: bytes) -> None:
        getattr(self.io, kind).unpack(data)

    def cpu_s(self, seconds: float) -> float:
        """Seconds of a core that this process takes while it does nothing for so long."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def codes(self) -> dict[str, Any]:
        """How the enumeration of codes behaves."""
        codes = self.io.StatusCode
        return {
            "begin": hasattr(codes, "ERR_BEGIN"),
            "equals a number": codes.SUCCESS == 0,
            "ordered": _raises(lambda: codes.SUCCESS < codes.INIT),
            "number": int(codes.ERR_RDMA_OP),
            "exported": hasattr(self.io, "TransferStatus"),
        }

    def _final(self, status: Any) -> Any:
        end = time.monotonic() + _LIMIT_S
        while (status.InProgress() or status.Init()) and time.monotonic() < end:
            time.sleep(0.0005)
        return status

    def _said(self, status: Any) -> Said:
        return status.Code().name, str(status.Message())


def _raises(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def _serve(folder: str, pipe: Connection) -> None:
    sys.path.insert(0, folder)
    body = _Body()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(body, method)(*arguments)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)
