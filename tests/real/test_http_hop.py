"""`router capture`: hops that pass on every byte between a router and engines, and note the legs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from kvcover.real_backend.router.http_hop import Hop, capture
from kvcover.sim.scenario.legs_file import parse_legs

PREFILL = {"do_remote_decode": True, "remote_tp_size": 8, "transfer_id": "tx-1"}
DECODE = {"do_remote_prefill": True, "remote_tp_size": 4, "transfer_id": "tx-1"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


async def engine(port: int, heard: list[bytes]) -> asyncio.Server:
    """Answers every request with its body, in two pieces."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(1 << 16)
        heard.append(data)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"3\r\ndef\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    return await asyncio.start_server(connection, "127.0.0.1", port)


async def post(port: int, body: bytes, chunked: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n" + sent)
    answer = await reader.read()
    writer.close()
    return answer


def play(
    bodies: list[tuple[str, dict[str, Any]]], seconds: float = 5.0, chunked: bool = False
) -> tuple[Any, list[bytes], list[bytes]]:
    """Both hops, with an engine behind each, and these requests by side; the legs, the answers, what the engines heard."""
    ports = {side: (free_port(), free_port()) for side in ("prefill", "decode")}
    heard: list[bytes] = []

    async def run() -> tuple[Any, list[bytes]]:
        engines = [await engine(ports[side][1], heard) for side in ports]
        hops: Any = {side: Hop(("127.0.0.1", a), ("127.0.0.1", b)) for side, (a, b) in ports.items()}
        listening = asyncio.Event()
        capturing = asyncio.create_task(capture(hops, seconds, listening.set))
        await listening.wait()
        answers = [await post(ports[side][0], json.dumps(body).encode(), chunked) for side, body in bodies]
        legs = await capturing
        for each in engines:
            each.close()
        return legs, answers

    legs, answers = asyncio.run(run())
    return legs, answers, heard


@pytest.mark.parametrize("chunked", [False, True])
def test_legs_go_by_and_nothing_is_changed(chunked: bool) -> None:
    bodies = [("prefill", {"model": "m", "kv_transfer_params": PREFILL}), ("decode", {"model": "m", "kv_transfer_params": DECODE})]
    legs, answers, heard = play(bodies, chunked=chunked)
    assert legs == {"prefill": PREFILL, "decode": DECODE}
    assert parse_legs(json.dumps(legs), "-").legs["write", "decode"] == DECODE | {"transfer_id": "$transfer_id"}
    assert [json.dumps(body).encode() in data for (_, body), data in zip(bodies, heard, strict=True)] == [True, True]
    assert all(answer.endswith(b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n") for answer in answers)


def test_legs_of_two_requests_are_not_mixed() -> None:
    other = PREFILL | {"transfer_id": "tx-0"}
    bodies = [("prefill", {"kv_transfer_params": other}), ("prefill", {"kv_transfer_params": PREFILL}),
              ("decode", {"kv_transfer_params": DECODE})]  # fmt: skip
    assert play(bodies)[0] == {"prefill": PREFILL, "decode": DECODE}


def test_it_ends_in_time_with_what_it_has() -> None:
    began = time.monotonic()
    legs, _, _ = play([("prefill", {"kv_transfer_params": PREFILL}), ("decode", {"prompt": "no leg"})], seconds=0.5)
    assert legs == {"prefill": PREFILL}
    assert time.monotonic() - began < 5


def test_an_engine_that_is_not_there_is_a_502() -> None:
    async def run() -> bytes:
        port, listening = free_port(), asyncio.Event()
        hop = Hop(("127.0.0.1", port), ("127.0.0.1", free_port()))
        capturing = asyncio.create_task(capture({"prefill": hop}, 0.5, listening.set))
        await listening.wait()
        answer = await post(port, b"{}")
        await capturing
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 502 ")
