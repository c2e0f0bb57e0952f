"""HTTP/1.1 as far as it is needed between a router and its engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

MOST_HEAD, MOST_BODY = 1 << 16, 1 << 26
Params = dict[str, Any]


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """A request line or status line and the fields below it; empty where the other side has no more to say."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def fields_of(head: bytes) -> dict[str, str]:
    """Its fields, names in lower case."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip()}


async def read_body(
    reader: asyncio.StreamReader, fields: Mapping[str, str], passed: Callable[[bytes], None] = lambda _piece: None
) -> bytes:
    """What a message holds below its fields; every byte goes to `passed` as it came. Raises ValueError for one that is too long."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        return await _chunks(reader, passed)
    size = int(fields.get("content-length", "0"))
    if size > MOST_BODY:
        raise ValueError("a body that is too long")
    body = await reader.readexactly(size)
    passed(body)
    return body


async def _chunks(reader: asyncio.StreamReader, passed: Callable[[bytes], None]) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if len(body) + size > MOST_BODY:
            raise ValueError("a body that is too long")
        chunk = await reader.readexactly(size + 2)
        passed(line + chunk)
        body += chunk[:size]
        if size == 0:
            return body


def table_of(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds, an empty one if it holds none."""
    try:
        found = json.loads(body) if body else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def post(port: int, path: str, body: Mapping[str, Any], limit_s: float) -> tuple[int, str]:
    """Ask 127.0.0.1:port; the answer's status and text. Raises OSError where nobody listens, TimeoutError where nobody answers."""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MOST_HEAD)
        try:
            data = json.dumps(body).encode()
            fields = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
            writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
            await writer.drain()
            head = await read_head(reader)
            if not head:
                raise ConnectionResetError("the connection was closed without an answer")
            own = fields_of(head)
            whole = "content-length" in own or "transfer-encoding" in own
            try:
                text = await read_body(reader, own) if whole else await reader.read(MOST_BODY)
            except (
                asyncio.IncompleteReadError
            ) as error:  # it told another length than it sent, as vllm-router does of what it rewrote
                text = error.partial
            return int(head.split(b" ", 2)[1]), text.decode(errors="replace")
        except (ValueError, IndexError) as error:
            raise ConnectionResetError(f"no HTTP answer: {error}") from None
        finally:
            writer.close()
