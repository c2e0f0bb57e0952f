"""How an engine makes itself known to a router: one ZMQ message again and again, as MoRI-IO's connector sends it.

Written out here (ZMTP 3.0, a DEALER without security), since the model's environment has no ZMQ.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

EVERY_S = 0.5
"""vLLM's is 3 s; a router that counts in seconds sees a healthy instance either way, and this one sooner."""
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4) + b"DEALER" + b"\x08Identity" + (0).to_bytes(4)
_COMMAND, _LONG = 4, 2


def frame(data: bytes, flags: int = 0) -> bytes:
    """One frame, the last of its message."""
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | _LONG]) + len(data).to_bytes(8) + data


async def announce(port: int, registration: Mapping[str, Any]) -> None:
    """Register at 127.0.0.1:port, and again if the connection is lost, until cancelled."""
    message = frame(msgspec.msgpack.encode(registration))
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_GREETING)
                async with asyncio.timeout(5):
                    await reader.readexactly(len(_GREETING))
                    writer.write(frame(_READY, _COMMAND))
                while not reader.at_eof():
                    writer.write(message)
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(EVERY_S):
                            await reader.read(1 << 12)
            finally:
                writer.close()
        await asyncio.sleep(0.1)
