"""Memory of other processes on this host, for the stand-in: `process_vm_readv` and `process_vm_writev`."""

from __future__ import annotations

import ctypes
import os

_IOV_MAX = 1024
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = [("iov_base", ctypes.c_void_p), ("iov_len", ctypes.c_size_t)]


def copy(kind: str, pid: int, local: int, remote: int, ranges: list[tuple[int, int, int]]) -> None:
    """Read from or write to process `pid`: ranges are (offset from `local`, offset from `remote`, size) in bytes.

    Raises OSError, also when only a part was copied.
    """
    for start in range(0, len(ranges), _IOV_MAX):
        part = ranges[start : start + _IOV_MAX]
        _copy(kind, pid, [(local + here, size) for here, _, size in part], [(remote + there, size) for _, there, size in part])


def _copy(kind: str, pid: int, here: list[tuple[int, int]], there: list[tuple[int, int]]) -> None:
    here_vector = (_Iovec * len(here))(*(_Iovec(*each) for each in here))
    there_vector = (_Iovec * len(there))(*(_Iovec(*each) for each in there))
    call = _libc.process_vm_readv if kind == "read" else _libc.process_vm_writev
    call.restype = ctypes.c_ssize_t
    copied = call(pid, here_vector, len(here), there_vector, len(there), 0)
    if copied < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if copied != sum(size for _, size in here):
        raise OSError(f"only {copied} bytes of the batch were copied")


def flag() -> ctypes.c_ubyte:
    """A byte of this process that peers can read; 1."""
    return ctypes.c_ubyte(1)


def address(byte: ctypes.c_ubyte) -> int:
    """Where such a byte is."""
    return ctypes.addressof(byte)


def read_byte(pid: int, at: int) -> int:
    """A byte of process `pid`. Raises OSError if it is gone."""
    found = ctypes.c_ubyte(0)
    copy("read", pid, ctypes.addressof(found), at, [(0, 0, 1)])
    return found.value


def allow_peers() -> None:
    """Let any process of this user reach this one's memory where the Yama module would forbid it; harmless elsewhere."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
