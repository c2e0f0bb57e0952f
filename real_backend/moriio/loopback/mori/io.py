"""`mori.io` without a NIC: one-sided reads and writes between the private memory of processes on one host.

Only the surface that vLLM's MoRI-IO connector uses is here, with the semantics that the connector can observe, as AMD's library
has them over a NIC: `tests/real/test_mori_semantics.py` asks both the same. What that library does to speed a batch up (merging,
several queue pairs) can't be seen from outside and is left out. Bytes move at the post, with `process_vm_readv` and
`process_vm_writev`, so both processes must belong to one user; `completion_delay_s` postpones bytes and completion. GPU memory:
see `device.py`.
"""

# ruff: noqa: A002 -- the real library's spelling

from __future__ import annotations

import operator
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgpack

from mori import cpp, host
from mori.cpp import (
    BackendType,
    IOEngineConfig,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    XgmiBackendConfig,
)

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
    "XgmiBackendConfig",
]

completion_delay_s = float(os.environ.get("KVCOVER_LOOPBACK_DELAY_S", "0"))
"""Seconds between the post of a batch and its bytes and completion; 0 does both inside the post. May be set at any time."""

_MAX_TRANSFER_BYTES = 2**32 - 1
_RETRIES_S = 4.096e-6 * 2**14 * 8  # the library's own timeout and number of retries
_GONE, _FLUSHED = "transport retry counter exceeded", "Work Request Flushed Error"


class _Packed:
    """Descriptors travel as msgpack arrays, one entry a field in order."""

    def pack(self) -> bytes:
        """Return the wire form."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]  # type: ignore[attr-defined]
        return bytes(msgpack.packb([int(value) if isinstance(value, MemoryLocationType) else value for value in values]))


def _unpacked(data: bytes, count: int) -> list[Any]:
    try:
        values = msgpack.unpackb(data)
    except Exception as error:
        raise RuntimeError(f"insufficient or bad bytes: {error}") from None
    if not isinstance(values, list) or len(values) < count:
        raise RuntimeError("std::bad_cast")
    return values


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
        """Read the wire form. Raises RuntimeError for what is none."""
        return EngineDesc(*_unpacked(data, 6))


@dataclass(frozen=True, slots=True)
class MemoryDesc(_Packed):
    """A registered region: `data` is its address in the owner's process, `size` its length in bytes."""

    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int
    loc: MemoryLocationType | int
    ipc_handle: bytes = b""
    """How a peer opens a GPU's memory; of host memory the address, there, of a byte that is 1 while it is registered."""

    @staticmethod
    def unpack(data: bytes) -> MemoryDesc:
        """Read the wire form. Raises RuntimeError for what is none."""
        key, number, device, bus, address, size, place, *handle = _unpacked(data, 7)
        return MemoryDesc(key, number, device, bus, address, size, MemoryLocationType(place), handle[0] if handle else b"")


@dataclass(frozen=True, slots=True)
class PostedBatch:
    """What one post did; kept so that a test can tell who wrote to whom. The real library keeps no such record."""

    kind: str
    local_engine: str
    remote_engine: str
    remote_ranges: tuple[tuple[int, int], ...]
    """Address and length in bytes of each entry, in the remote process."""
    status: cpp.TransferStatus = field(compare=False)
    local: int = 0
    """Where its last byte is here: the first may be of a block that is nobody's, which stands for what has left a window."""
    at_ns: int = 0
    """When it was posted, on the monotonic clock."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(length for _, length in self.remote_ranges)


class _QueuePair:
    """The connection of an engine to one peer, made once and never again: after an error all that follows is flushed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.gone_at = 0.0  # when the retries to a peer that is no more are over, on the monotonic clock; 0: nobody knows of it
        self._lock = threading.Lock()

    def fail(self, status: cpp.TransferStatus, text: str) -> None:
        """End a batch in an error that a NIC tells, at once."""
        self.dead = True
        status.Update(StatusCode.ERR_RDMA_OP, text)

    def lose(self, status: cpp.TransferStatus) -> None:
        """End a batch to a peer that doesn't answer, when all retries are over; those behind it are flushed then."""
        with self._lock:
            text = _FLUSHED if self.gone_at else _GONE
            self.gone_at = self.gone_at or time.monotonic() + _RETRIES_S
        timer = threading.Timer(max(0.0, self.gone_at - time.monotonic()), self.fail, (status, text))
        timer.daemon = True
        timer.start()


class IOEngine:
    """One rank's transfer engine. `posted` lists every batch of this process, oldest first."""

    posted: ClassVar[list[PostedBatch]] = []

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(key, "loopback", os.uname().nodename, config.host, int(config.port), os.getpid())
        self._backends: list[BackendType] = []
        self._peers: dict[str, EngineDesc] = {}
        self._queue_pairs: dict[str, _QueuePair] = {}
        self._next_memory_id = 0
        self._next_uid = 0
        self._lock = threading.Lock()
        self._on_gpu: dict[int, Any] = {}
        self._registered: dict[int, Any] = {}
        self._control = socket.socket()
        host.allow_peers()

    def __del__(self) -> None:
        self._control.close()

    def create_backend(self, type: BackendType, config: RdmaBackendConfig | XgmiBackendConfig | None = None) -> None:
        """Choose a transport. Without one no session can be made, as in the real library.

        RDMA listens on the control port, and ends the process if that is taken.
        """
        if type is BackendType.RDMA and not self._backends:
            try:
                self._control.bind((self._desc.host, self._desc.port))
            except OSError as error:
                print(f"syscall failed with {error.strerror}", file=sys.stderr, flush=True)
                os._exit(255)
            self._control.listen(1)
            desc = self._desc
            port = self._control.getsockname()[1]
            self._desc = EngineDesc(desc.key, desc.node_id, desc.hostname, desc.host, port, desc.pid)
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
            memory_id = self._next_memory_id
            self._next_memory_id += 1
        nbytes = int(tensor.nelement()) * int(tensor.element_size())
        address = int(tensor.data_ptr())
        if not tensor.is_cuda:
            flag = self._registered[memory_id] = host.flag()
            handle = struct.pack("<Q", host.address(flag))
            return MemoryDesc(self._desc.key, memory_id, -1, "", address, nbytes, MemoryLocationType.CPU, handle)
        from mori import device

        region = self._on_gpu[memory_id] = device.as_bytes(tensor)
        place = (tensor.device.index, "", address, nbytes, MemoryLocationType.GPU)
        return MemoryDesc(self._desc.key, memory_id, *place, device.export(region))

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        """Take a region back: whoever moves bytes from or to it then loses its queue pair. Of a GPU's memory nothing is kept."""
        if flag := self._registered.get(mem_desc.id):
            flag.value = 0

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> IOEngineSession | None:
        """Pair two regions. None without a backend, and for a peer that was never registered.

        A peer that comes back under its name is still asked for where it was: the queue pair is of the process that is gone.
        """
        peer = self._peers.get(remote_mem.engine_key)
        if not self._backends or peer is None:
            return None
        queue_pair = self._queue_pairs.setdefault(remote_mem.engine_key, _QueuePair(peer.pid))
        here = self._registered.get(local_mem.id), self._on_gpu.get(local_mem.id)
        return IOEngineSession(local_mem, remote_mem, queue_pair, *here)

    def allocate_transfer_uid(self) -> int:
        """Return a number that names one transfer of this engine."""
        with self._lock:
            self._next_uid += 1
            return self._next_uid - 1

    def wait_all(self, statuses: Sequence[cpp.TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """Wait while a status is in progress, or until `timeout_ms` passed; a failure doesn't end the wait.

        Returns the first error code, else the first that is no success, else SUCCESS. Negative: no limit. Raises TypeError
        for anything but its own statuses, as the real binding does.
        """
        if not all(isinstance(status, cpp.TransferStatus) for status in statuses):
            raise TypeError("WaitAll(): incompatible function arguments")
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        while any(status.InProgress() for status in statuses):
            if deadline is not None and time.monotonic() >= deadline:
                break
            time.sleep(0.0005)
        failed = [status.Code() for status in statuses if status.Failed()]
        open_ = [status.Code() for status in statuses if not status.Succeeded()]
        return (failed or open_ or [StatusCode.SUCCESS])[0]


class IOEngineSession:
    """A pair of regions. Offsets are bytes from the start of each; `sizes` are bytes."""

    def __init__(
        self, local: MemoryDesc, remote: MemoryDesc, queue_pair: _QueuePair, registered: Any = None, local_gpu: Any = None
    ) -> None:
        self._local = local
        self._remote = remote
        self._queue_pair = queue_pair
        self._registered = registered
        self._local_gpu = local_gpu
        self._remote_gpu: Any = None

    def batch_read(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], transfer_uid: int, /
    ) -> cpp.TransferStatus:
        """Copy remote bytes here, one entry a position of the three lists."""
        return self._post("read", local_offsets, remote_offsets, sizes)

    def batch_write(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], transfer_uid: int, /
    ) -> cpp.TransferStatus:
        """Copy local bytes there, one entry a position of the three lists."""
        return self._post("write", local_offsets, remote_offsets, sizes)

    def read(self, local_offset: int, remote_offset: int, size: int, transfer_uid: int, /) -> cpp.TransferStatus:
        """Copy one remote range here."""
        return self._post("read", [local_offset], [remote_offset], [size])

    def write(self, local_offset: int, remote_offset: int, size: int, transfer_uid: int, /) -> cpp.TransferStatus:
        """Copy one local range there."""
        return self._post("write", [local_offset], [remote_offset], [size])

    def alive(self) -> bool:
        """Tell whether no batch has found the peer gone yet: nothing else is noticed, as in the real library."""
        return not 0 < self._queue_pair.gone_at <= time.monotonic()

    def _post(self, kind: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> cpp.TransferStatus:
        _refuse_other_numbers(local, remote, sizes)
        status = cpp.TransferStatus()
        ranges = tuple((self._remote.data + offset, size) for offset, size in zip(remote, sizes, strict=False))
        last = self._local.data + (local[-1] + sizes[-1] - 1 if local and sizes else 0)
        batch = PostedBatch(kind, self._local.engine_key, self._remote.engine_key, ranges, status, last, time.monotonic_ns())
        IOEngine.posted.append(batch)
        problem = self._refuse(local, remote, sizes)
        if problem:
            status.Update(StatusCode.ERR_INVALID_ARGS, problem)
            return status
        # the library puts entries in order by where they are in the peer's memory, to join neighbours
        entries = sorted(zip(local, remote, sizes, strict=True), key=lambda entry: entry[1])
        status.Update(StatusCode.IN_PROGRESS, "")
        if completion_delay_s > 0 and entries:
            timer = threading.Timer(completion_delay_s, self._move, (kind, entries, status))
            timer.daemon = True
            timer.start()
        else:
            self._move(kind, entries, status)
        return status

    def _refuse(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> str:
        if not len(local) == len(remote) == len(sizes):
            return "lengths of local offsets, remote offsets or sizes mismatch"
        for here, there, size in zip(local, remote, sizes, strict=True):
            # the library adds in 64 bits: what wraps around passes, and the NIC refuses it
            if (here + size) % 2**64 > self._local.size or (there + size) % 2**64 > self._remote.size:
                return "length out of range"
            if size > _MAX_TRANSFER_BYTES:
                return f"single request size {size} exceeds UINT32_MAX; split it before submitting"
        return ""

    def _move(self, kind: str, entries: list[tuple[int, int, int]], status: cpp.TransferStatus) -> None:
        queue_pair = self._queue_pair
        entries = [entry for entry in entries if entry[2]]
        if not entries:
            status.Update(StatusCode.SUCCESS, "success")
        elif queue_pair.dead:
            queue_pair.fail(status, _FLUSHED)
        elif queue_pair.gone_at:
            queue_pair.lose(status)
        elif self._registered is not None and not self._registered.value:
            queue_pair.fail(status, "local protection error")
        else:
            self._copy(kind, entries, status)

    def _copy(self, kind: str, entries: list[tuple[int, int, int]], status: cpp.TransferStatus) -> None:
        try:
            if self._local_gpu is not None:
                self._move_on_gpu(kind, entries)
            elif not self._peer_has_it() or any(there >= self._remote.size for _, there, _ in entries):
                self._queue_pair.fail(status, "remote access error")
                return
            else:
                host.copy(kind, self._queue_pair.pid, self._local.data, self._remote.data, entries)
        except (OSError, RuntimeError):  # the peer's process or its GPU memory is gone
            self._queue_pair.lose(status)
        else:
            status.Update(StatusCode.SUCCESS, "success")

    def _peer_has_it(self) -> bool:
        """Whether the owner still registers the region. Raises OSError if it is no more."""
        handle = self._remote.ipc_handle
        return len(handle) != 8 or host.read_byte(self._queue_pair.pid, struct.unpack("<Q", handle)[0]) == 1

    def _move_on_gpu(self, kind: str, ranges: list[tuple[int, int, int]]) -> None:
        from mori import device

        if self._remote_gpu is None:
            self._remote_gpu = device.opened(self._remote.ipc_handle)
        if kind == "read":
            device.copy(self._remote_gpu, self._local_gpu, [(there, here, size) for here, there, size in ranges])
        else:
            device.copy(self._local_gpu, self._remote_gpu, ranges)


def _refuse_other_numbers(*lists: Sequence[int]) -> None:
    """Raise TypeError for what is no unsigned integer of 64 bits: the real binding refuses the call itself."""
    numbers = [operator.index(each) for one in lists for each in one]
    if not all(0 <= each < 2**64 for each in numbers):
        raise TypeError("incompatible function arguments: offsets and sizes are unsigned, of 64 bits")
