"""A `mori` whose binding is as strict as the real one's, where the stand-in is a Python module like any other.

As pybind11 makes them: enumerations that have no order, no `[...]` and no ERR_BEGIN, and functions that take no other type than
their own. As the library does it: a post returns at once, its bytes and its completion come from another thread, a success
has a text too, and `mori.io` doesn't export the type of a status.
"""

# ruff: noqa: N802 -- the real library's spelling

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

_COMPLETION_S = 0.02


class StatusCode:
    """A pybind11 enumeration: members compare with members by equality alone."""

    SUCCESS: ClassVar[StatusCode]
    INIT: ClassVar[StatusCode]
    IN_PROGRESS: ClassVar[StatusCode]

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatusCode) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __int__(self) -> int:
        return self.value


_CODES = {"SUCCESS": 0, "INIT": 1, "IN_PROGRESS": 2, "ERR_INVALID_ARGS": 11, "ERR_NOT_FOUND": 12, "ERR_RDMA_OP": 13, "ERR_BAD_STATE": 14,
          "ERR_GPU_OP": 15}  # fmt: skip
for _name, _value in _CODES.items():
    setattr(StatusCode, _name, StatusCode(_name, _value))


def _only(kind: type, *values: Any) -> None:
    for value in values:
        if type(value) is not kind:
            raise TypeError(f"incompatible function arguments: {type(value).__name__} for {kind.__name__}")


class TransferStatus:
    """The state of one batch; errors are sticky."""

    def __init__(self) -> None:
        self._code, self._message = StatusCode.INIT, ""
        self._changed = threading.Condition()

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return self._message

    def Init(self) -> bool:
        return self._code == StatusCode.INIT

    def InProgress(self) -> bool:
        return self._code == StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self._code == StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code.value > 10

    def Update(self, code: StatusCode, message: str) -> None:
        _only(StatusCode, code)
        _only(str, message)
        with self._changed:
            if not self.Failed():
                self._code, self._message = code, message
            self._changed.notify_all()

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        with self._changed:
            self._changed.wait_for(lambda: not self.InProgress(), None if timeout_ms < 0 else timeout_ms / 1e3)
        return self._code

    def Wait(self) -> None:
        self.WaitFor(-1)


class MemoryDesc:
    """A region: its owner's key, its address and its bytes."""

    def __init__(self, engine_key: str, data: int, size: int) -> None:
        self.engine_key, self.data, self.size = engine_key, data, size


class IOEngineSession:
    """Copies inside this process, a moment after the post."""

    def __init__(self, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._local, self._remote = local.data, remote.data

    def batch_write(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], uid: int) -> TransferStatus:
        return self._post(
            [(self._remote + there, self._local + here, size) for here, there, size in zip(local, remote, sizes, strict=True)]
        )

    def batch_read(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], uid: int) -> TransferStatus:
        return self._post(
            [(self._local + here, self._remote + there, size) for here, there, size in zip(local, remote, sizes, strict=True)]
        )

    def _post(self, copies: list[tuple[int, int, int]]) -> TransferStatus:
        status = TransferStatus()
        status.Update(StatusCode.IN_PROGRESS, "")

        def complete() -> None:
            for to, source, size in copies:
                ctypes.memmove(to, source, size)
            status.Update(StatusCode.SUCCESS, "success")

        timer = threading.Timer(_COMPLETION_S, complete)
        timer.daemon = True
        timer.start()
        return status


class IOEngine:
    """Makes sessions and waits for statuses."""

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession:
        return IOEngineSession(local, remote)

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        _only(TransferStatus, *statuses)
        deadline = time.monotonic() + timeout_ms / 1e3
        for status in statuses:
            status.WaitFor(-1 if timeout_ms < 0 else max(0, round((deadline - time.monotonic()) * 1e3)))
        codes = [status.Code() for status in statuses]
        return next((code for code in codes if code != StatusCode.SUCCESS), StatusCode.SUCCESS)


def modules() -> dict[str, ModuleType]:
    """The modules by name. The classes are made anew, as faults and recorders change them."""
    mori, io, cpp = (ModuleType(name) for name in ("mori", "mori.io", "mori.cpp"))
    cpp.__dict__.update(StatusCode=StatusCode, TransferStatus=TransferStatus, MemoryDesc=MemoryDesc)
    engine = type("IOEngine", (IOEngine,), {})
    io.__file__ = "/nowhere/mori/io/__init__.py"
    io.__dict__.update(StatusCode=StatusCode, MemoryDesc=MemoryDesc, IOEngine=engine)
    mori.__dict__.update(io=io, cpp=cpp)
    return {"mori": mori, "mori.io": io, "mori.cpp": cpp}
