"""`mori.io` without a NIC: one-sided reads and writes between the private memory of processes on one host.

Only the surface that vLLM's MoRI-IO connector uses is here, with the semantics that the connector can observe: a status
that starts INIT and never leaves an error, list and bound checks before anything moves, an empty batch that succeeds at
once, and no finer bound than the registered region. What the real library does to speed a batch up (merging, several
queue pairs) can't be seen from outside and is left out. Bytes move at the post, with `process_vm_readv` and
`process_vm_writev`, so both processes must belong to one user; `completion_delay_s` postpones bytes and completion. GPU memory:
see `device.py`.
"""

# ruff: noqa: N802, A002 -- the real library's spelling

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import msgpack

from mori import host

__all__ = [
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "PostedBatch",
    "RdmaBackendConfig",
    "StatusCode",
    "TransferStatus",
    "XgmiBackendConfig",
]

completion_delay_s = float(os.environ.get("KVCOVER_LOOPBACK_DELAY_S", "0"))
"""Seconds between the post of a batch and its bytes and completion; 0 does both inside the post. May be set at any time."""

_MAX_TRANSFER_BYTES = 2**32 - 1


class BackendType(IntEnum):
    """Transports that the real library knows. The stand-in accepts any and moves bytes in the same way."""

    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(IntEnum):
    """Where a registered region lives."""

    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(IntEnum):
    """Life cycle of a transfer: INIT, IN_PROGRESS, then SUCCESS or an error above ERR_BEGIN."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_BEGIN = 10
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class PollCqMode(IntEnum):
    """How the real library waits for completions."""

    POLLING = 0
    EVENT = 1


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
        """Return the text that came with the code; empty on success."""
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
        return self._code > StatusCode.ERR_BEGIN

    def Update(self, code: StatusCode, message: str = "") -> None:
        """Move to `code`, unless an error was stored before."""
        with self._lock:
            if self._code <= StatusCode.ERR_BEGIN:
                if code == StatusCode.SUCCESS and not self.done_ns:
                    self.done_ns = time.monotonic_ns()
                self._code, self._message = code, message


class _Packed:
    """Descriptors travel as msgpack arrays, one entry a field in order."""

    def pack(self) -> bytes:
        """Return the wire form."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]  # type: ignore[attr-defined]
        return bytes(msgpack.packb(values))


@dataclass(frozen=True, slots=True)
class EngineDesc(_Packed):
    """Who an engine is: `pid` is the process whose memory its regions are in."""

    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    @staticmethod
    def unpack(data: bytes) -> EngineDesc:
        """Read the wire form; msgpack's errors pass through."""
        return EngineDesc(*msgpack.unpackb(data))


@dataclass(frozen=True, slots=True)
class MemoryDesc(_Packed):
    """A registered region: `data` is its address in the owner's process, `size` its length in bytes."""

    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int
    loc: int
    ipc_handle: bytes = b""
    """How a peer opens it if it is a GPU's memory."""

    @staticmethod
    def unpack(data: bytes) -> MemoryDesc:
        """Read the wire form; msgpack's errors pass through."""
        return MemoryDesc(*msgpack.unpackb(data))


@dataclass(slots=True)
class IOEngineConfig:
    """Address of an engine's control plane. The stand-in has none and listens nowhere."""

    host: str = ""
    port: int = 0


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


@dataclass(frozen=True, slots=True)
class PostedBatch:
    """What one post did; kept so that a test can tell who wrote to whom. The real library keeps no such record."""

    kind: str
    local_engine: str
    remote_engine: str
    remote_ranges: tuple[tuple[int, int], ...]
    """Address and length in bytes of each entry, in the remote process."""
    status: TransferStatus = field(compare=False)
    local: int = 0
    """Where its last byte is here: the first may be of a block that is nobody's, which stands for what has left a window."""
    at_ns: int = 0
    """When it was posted, on the monotonic clock."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(length for _, length in self.remote_ranges)


class IOEngine:
    """One rank's transfer engine. `posted` lists every batch of this process, oldest first."""

    posted: ClassVar[list[PostedBatch]] = []

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(key, "loopback", os.uname().nodename, config.host, int(config.port), os.getpid())
        self._backends: list[BackendType] = []
        self._peers: dict[str, EngineDesc] = {}
        self._next_memory_id = 0
        self._next_uid = 0
        self._lock = threading.Lock()
        self._on_gpu: dict[int, Any] = {}
        host.allow_peers()

    def create_backend(self, type: BackendType, config: RdmaBackendConfig | XgmiBackendConfig | None = None) -> None:
        """Choose a transport. Without one no session can be made, as in the real library."""
        self._backends.append(type)

    def get_engine_desc(self) -> EngineDesc:
        """Return what a peer needs to register this engine."""
        return self._desc

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Make a peer's regions reachable."""
        self._peers[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Forget a peer."""
        self._peers.pop(engine_desc.key, None)

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        """Register a contiguous tensor of any shape; raises RuntimeError if it is not contiguous."""
        if not tensor.is_contiguous():
            raise RuntimeError("input tensor must be contiguous")
        with self._lock:
            self._next_memory_id += 1
            memory_id = self._next_memory_id
        nbytes = int(tensor.nelement()) * int(tensor.element_size())
        address = int(tensor.data_ptr())
        if not tensor.is_cuda:
            return MemoryDesc(self._desc.key, memory_id, -1, "", address, nbytes, int(MemoryLocationType.CPU))
        from mori import device

        region = self._on_gpu[memory_id] = device.as_bytes(tensor)
        place = (tensor.device.index, "", address, nbytes, int(MemoryLocationType.GPU))
        return MemoryDesc(self._desc.key, memory_id, *place, device.export(region))

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        """Do nothing: regions are not tracked."""

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> IOEngineSession | None:
        """Pair two regions. None without a backend; raises RuntimeError for a peer that was never registered."""
        if not self._backends:
            return None
        peer = self._peers.get(remote_mem.engine_key)
        if peer is None:
            raise RuntimeError(f"remote engine {remote_mem.engine_key} is not registered")
        return IOEngineSession(local_mem, remote_mem, peer.pid, self._on_gpu.get(local_mem.id))

    def allocate_transfer_uid(self) -> int:
        """Return a number that names one transfer of this engine."""
        with self._lock:
            self._next_uid += 1
            return self._next_uid

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """Wait until every status is final or `timeout_ms` passed; a failure doesn't end the wait.

        Returns the first error code, else IN_PROGRESS when time ran out, else SUCCESS. Negative: no limit. Raises TypeError
        for anything but its own statuses, as the real binding does.
        """
        if not all(isinstance(status, TransferStatus) for status in statuses):
            raise TypeError("WaitAll(): incompatible function arguments")
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        while any(not (status.Succeeded() or status.Failed()) for status in statuses):
            if deadline is not None and time.monotonic() >= deadline:
                break
            time.sleep(0.0005)
        codes = [status.Code() for status in statuses]
        errors = [code for code in codes if code > StatusCode.ERR_BEGIN]
        if errors:
            return errors[0]
        return StatusCode.SUCCESS if all(code == StatusCode.SUCCESS for code in codes) else StatusCode.IN_PROGRESS


class IOEngineSession:
    """A pair of regions. Offsets are bytes from the start of each; `sizes` are bytes."""

    def __init__(self, local: MemoryDesc, remote: MemoryDesc, remote_pid: int, local_gpu: Any = None) -> None:
        self._local = local
        self._remote = remote
        self._remote_pid = remote_pid
        self._local_gpu = local_gpu
        self._remote_gpu: Any = None

    def batch_read(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], transfer_uid: int, /
    ) -> TransferStatus:
        """Copy remote bytes here, one entry a position of the three lists."""
        return self._post("read", local_offsets, remote_offsets, sizes)

    def batch_write(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], transfer_uid: int, /
    ) -> TransferStatus:
        """Copy local bytes there, one entry a position of the three lists."""
        return self._post("write", local_offsets, remote_offsets, sizes)

    def read(self, local_offset: int, remote_offset: int, size: int, transfer_uid: int, /) -> TransferStatus:
        """Copy one remote range here."""
        return self._post("read", [local_offset], [remote_offset], [size])

    def write(self, local_offset: int, remote_offset: int, size: int, transfer_uid: int, /) -> TransferStatus:
        """Copy one local range there."""
        return self._post("write", [local_offset], [remote_offset], [size])

    def alive(self) -> bool:
        """Tell whether the peer's process still exists."""
        return os.path.exists(f"/proc/{self._remote_pid}")

    def _post(self, kind: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> TransferStatus:
        status = TransferStatus()
        ranges = tuple((self._remote.data + offset, size) for offset, size in zip(remote, sizes, strict=False))
        last = self._local.data + (local[-1] + sizes[-1] - 1 if local and sizes else 0)
        batch = PostedBatch(kind, self._local.engine_key, self._remote.engine_key, ranges, status, last, time.monotonic_ns())
        IOEngine.posted.append(batch)
        problem = self._refuse(local, remote, sizes)
        if problem:
            status.Update(StatusCode.ERR_INVALID_ARGS, problem)
        elif not sizes:
            status.Update(StatusCode.SUCCESS)
        elif completion_delay_s > 0:
            status.Update(StatusCode.IN_PROGRESS)
            arguments = (kind, list(local), list(remote), list(sizes), status)
            timer = threading.Timer(completion_delay_s, self._move, arguments)
            timer.daemon = True
            timer.start()
        else:
            status.Update(StatusCode.IN_PROGRESS)
            self._move(kind, local, remote, sizes, status)
        return status

    def _refuse(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> str:
        if not len(local) == len(remote) == len(sizes):
            return "lengths of local offsets, remote offsets and sizes should be equal"
        if any(offset < 0 for offset in (*local, *remote, *sizes)):
            # The real binding takes unsigned integers and refuses the call itself.
            raise TypeError("incompatible function arguments: offsets and sizes are unsigned")
        for here, there, size in zip(local, remote, sizes, strict=True):
            if size > _MAX_TRANSFER_BYTES:
                return f"transfer size {size} exceeds {_MAX_TRANSFER_BYTES}"
            if here + size > self._local.size or there + size > self._remote.size:
                return "length out of range"
        return ""

    def _move(self, kind: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], status: TransferStatus) -> None:
        ranges = list(zip(local, remote, sizes, strict=True))
        try:
            if self._local_gpu is not None:
                self._move_on_gpu(kind, ranges)
            else:
                host.copy(kind, self._remote_pid, self._local.data, self._remote.data, ranges)
        except (OSError, RuntimeError) as error:  # the peer's process or its GPU memory is gone
            status.Update(StatusCode.ERR_RDMA_OP, f"transport retry counter exceeded ({error})")
        else:
            status.Update(StatusCode.SUCCESS)

    def _move_on_gpu(self, kind: str, ranges: list[tuple[int, int, int]]) -> None:
        from mori import device

        if self._remote_gpu is None:
            self._remote_gpu = device.opened(self._remote.ipc_handle)
        if kind == "read":
            device.copy(self._remote_gpu, self._local_gpu, [(there, here, size) for here, there, size in ranges])
        else:
            device.copy(self._local_gpu, self._remote_gpu, ranges)
