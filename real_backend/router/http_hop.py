"""Small HTTP hops between a router and engines, which pass on every byte and note the legs that go by."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvcover.real_backend.driver.trial import ROLES, Role
from kvcover.real_backend.router.messages import MOST_HEAD, Params, fields_of, read_body, read_head, table_of


class Hop(NamedTuple):
    """Where a hop listens, and the engine behind it; host and port each."""

    listen: tuple[str, int]
    engine: tuple[str, int]


async def capture(hops: Mapping[Role, Hop], seconds: float, ready: Callable[[], None] = lambda: None) -> dict[Role, Params]:
    """Pass on what comes until a leg of each hop went by, or the time is over; the legs of the first request, by role.

    Two legs belong together by their `transfer_id`. Raises OSError where it can't listen.
    """
    noted: dict[Role, list[Params]] = {role: [] for role in hops}
    complete = asyncio.Event()

    def note(role: Role, params: Params) -> None:
        noted[role].append(params)
        if len(_together(noted)) == len(hops):
            complete.set()

    servers = [await asyncio.start_server(_Passing(role, hop, note).connection, *hop.listen) for role, hop in hops.items()]
    try:
        ready()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), seconds)
    finally:
        for server in servers:
            server.close()
    return _together(noted)


def _together(noted: Mapping[Role, list[Params]]) -> dict[Role, Params]:
    """The first leg of each role of one request; of what came alone the first."""
    first, second = noted.get("prefill", []), noted.get("decode", [])
    for prefill in first:
        for decode in second:
            if prefill.get("transfer_id") == decode.get("transfer_id"):
                return {"prefill": prefill, "decode": decode}
    return {role: noted[role][0] for role in ROLES if noted.get(role) and not (first and second)}


class _Passing:
    """The connections of one hop."""

    def __init__(self, role: Role, hop: Hop, note: Callable[[Role, Params], None]) -> None:
        self._role, self._hop, self._note = role, hop, note

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the router: requests are looked at, answers are not."""
        try:
            engine_reader, engine_writer = await asyncio.open_connection(*self._hop.engine)
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        answers = asyncio.create_task(_pump(engine_reader, writer))
        try:
            while await self._request(reader, engine_writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass
        finally:
            with contextlib.suppress(OSError):
                engine_writer.write_eof()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await answers
            engine_writer.close()

    async def _request(self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter) -> bool:
        """Pass on one request; False when the router has no more."""
        head = await read_head(reader)
        if not head:
            return False
        engine.write(head)
        body = await read_body(reader, fields_of(head), engine.write)
        await engine.drain()
        params = table_of(body).get("kv_transfer_params")
        if isinstance(params, dict) and params:
            self._note(self._role, params)
        return True


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on answers as they come, streamed ones too."""
    with contextlib.suppress(OSError):
        while data := await reader.read(MOST_HEAD):
            writer.write(data)
            await writer.drain()
    writer.close()
