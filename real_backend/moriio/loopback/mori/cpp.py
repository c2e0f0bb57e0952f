"""What the real package's binding defines: enumerations, settings and the status of a batch. `mori.io` shows all but the last."""

# ruff: noqa: N802 -- the real library's spelling

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum


class _Code(Enum):
    """As pybind11 makes them: equal to themselves alone, without an order, and a number only if asked for one."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class BackendType(_Code):
    """Transports that the real library knows. The stand-in accepts any and moves bytes in the same way."""

    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(_Code):
    """Where a registered region lives."""

    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(_Code):
    """Life cycle of a transfer: INIT, IN_PROGRESS, then SUCCESS or an error."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class PollCqMode(_Code):
    """How the real library waits for completions."""

    POLLING = 0
    EVENT = 1


@dataclass(slots=True)
class RdmaBackendConfig:
    """Settings of the RDMA transport, all without effect here."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = 1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True


@dataclass(slots=True)
class XgmiBackendConfig:
    """Settings of the xGMI transport, all without effect here."""

    num_streams: int = 64
    num_events: int = 64


@dataclass(slots=True)
class IOEngineConfig:
    """Address of an engine's control plane. The stand-in takes the port, as the library does, and answers nobody there."""

    host: str = ""
    port: int = 0


class TransferStatus:
    """Outcome of one batch. An error is sticky: whatever is reported after it is ignored."""

    def __init__(self) -> None:
        self._code = StatusCode.INIT
        self._message = ""
        self._lock = threading.Lock()
        self.done_ns = 0  # when it first said success, on the monotonic clock; the real library keeps no such time

    def Code(self) -> StatusCode:  # the real library's spelling
        """Return the current code."""
        return self._code

    def Message(self) -> str:
        """Return the text that came with the code."""
        return self._message

    def Init(self) -> bool:
        """Tell whether nothing was posted yet."""
        return self._code == StatusCode.INIT

    def InProgress(self) -> bool:
        """Tell whether the batch is posted and not complete."""
        return self._code == StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        """Tell whether all bytes are in place."""
        return self._code == StatusCode.SUCCESS

    def Failed(self) -> bool:
        """Tell whether the batch ended in an error."""
        return int(self._code) > int(StatusCode.IN_PROGRESS)

    def Update(self, code: StatusCode, message: str) -> None:
        """Move to `code`, unless an error was stored before."""
        with self._lock:
            if not self.Failed():
                if code == StatusCode.SUCCESS and not self.done_ns:
                    self.done_ns = time.monotonic_ns()
                self._code, self._message = code, message
