"""GPU memory for the stand-in: regions of other processes by torch's IPC handles, and copies as a NIC would make them.

Copies run on a stream that waits for no other, as a NIC knows nothing of streams: what a kernel has not written yet is not in
the bytes. Only torch is used, whose `torch.cuda` is the same on ROCm. Owners must keep a region's tensor as long as peers use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import torch

_streams: dict[int, Any] = {}


def as_bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor as a flat tensor of bytes, without a copy."""
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[offset : offset + tensor.nelement() * tensor.element_size()]


def export(region: Any) -> bytes:
    """What a peer needs to open a region of bytes: the handle of its storage, and where in it the region is."""
    shared = region.untyped_storage()._share_cuda_()
    return bytes(msgpack.packb([shared, region.storage_offset(), region.numel()]))


def opened(handle: bytes) -> Any:
    """The region behind a peer's handle, in that process's memory. torch opens each handle once a process."""
    shared, offset, size = msgpack.unpackb(handle)
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[offset : offset + size]


def copy(source: Any, target: Any, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Copy (offset in source, offset in target, size) each, and wait until all bytes are in place."""
    stream = _streams.setdefault(target.device.index, torch.cuda.Stream(target.device))
    with torch.cuda.stream(stream):
        for start, to, size in ranges:
            target[to : to + size].copy_(source[start : start + size], non_blocking=True)
    stream.synchronize()
