"""An engine as a router sees it: it registers, answers HTTP as vLLM's front end does, notes its legs, and computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec

from kvcover.real_backend.driver.trial import Role
from kvcover.real_backend.router.messages import MOST_HEAD, Params, fields_of, read_body, read_head, table_of
from kvcover.sim.releases.records import ConnectorRelease

ASKED = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion"}
"""What a leg is sent to, and what its answer is called."""
_KEPT = ("x-request-id", "x-data-parallel-rank")
_HOSTS = {"prefill": 1, "decode": 2}


class SeenLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One leg as it was received; `reply` is what prefill answered for it in READ, `headers` those that concern the transfer."""

    role: Role
    instance: int
    path: str
    headers: dict[str, str]
    request: dict[str, Any]
    params: Params | None
    reply: Params | None

    @property
    def dp_rank(self) -> int | None:
        """The DP rank that the router chose, None if it left that to the engine."""
        text = self.headers.get("x-data-parallel-rank", "")
        return int(text) if text.isdecimal() else None


class StubEngine:
    """One instance of a role; it answers 503 to a leg for which `note` says so.

    `odd`: in READ it answers as if its sizes and ids were others, to see who takes what from where.
    """

    def __init__(
        self,
        role: Role,
        instance: int,
        size: tuple[int, int],
        mode: str,
        release: ConnectorRelease,
        note: Callable[[SeenLeg], bool],
        odd: bool = False,
    ) -> None:
        self.role, self.instance, self.mode = role, instance, mode
        self.tp, self.dp = size
        self.host = f"10.0.0.{_HOSTS[role] + 2 * instance}"
        self._release, self._note, self._odd = release, note, odd
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a port of loopback that the system chooses."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=MOST_HEAD)

    def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def registration(self) -> dict[str, Any]:
        """What the connector's heartbeat says."""
        return {
            "type": self.role[0].upper(),
            "http_address": f"127.0.0.1:{self.port}",
            "zmq_address": f"host:{self.host},handshake:6301,notify:61005",
            "dp_size": self.dp,
            "tp_size": self.tp,
            "transfer_mode": self.mode.upper(),
        }

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await read_head(reader):
                fields = fields_of(head)
                path = head.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
                body = table_of(await read_body(reader, fields))
                writer.write(self._answer(path, fields, body))
                await writer.drain()
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # a router that is gone, or says what is no HTTP, ends this connection alone
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    def _answer(self, path: str, fields: dict[str, str], body: dict[str, Any]) -> bytes:
        if path in ASKED:
            return self._completion(path, fields, body)
        if path.endswith("/render"):
            rendered = {"request_id": "render-0", "token_ids": [1, 2, 3], "sampling_params": {}}
            return _json(rendered if "chat" in path else [rendered])
        if path == "/v1/models":
            return _json({"object": "list", "data": [{"id": "stub", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]})
        return _json({"status": "ok", "version": "0", "model_path": "stub", "is_generation": True})

    def _completion(self, path: str, fields: dict[str, str], body: dict[str, Any]) -> bytes:
        request = {key: value for key, value in body.items() if key not in ("prompt", "messages", "kv_transfer_params")}
        params = body.get("kv_transfer_params")
        params = params if isinstance(params, dict) and params else None
        headers = {name: fields[name] for name in _KEPT if name in fields}
        reply = self._reply(params, headers) if self.mode == "read" and self.role == "prefill" and params else None
        leg = SeenLeg(role=self.role, instance=self.instance, path=path, headers=headers, request=request,
                      params=params, reply=reply)  # fmt: skip
        if self._note(leg):
            return b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
        answer = {"id": "cmpl-0", "object": ASKED[path], "created": 0, "model": "stub", "kv_transfer_params": reply,
                  "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}  # fmt: skip
        if body.get("stream"):
            return _events(answer, "chat" in path)
        said = {"message": {"role": "assistant", "content": "ok"}} if "chat" in path else {"text": "ok"}
        return _json(answer | {"choices": [{"index": 0, "finish_reason": "length", "logprobs": None} | said]})

    def _reply(self, params: Params, headers: dict[str, str]) -> Params:
        """What prefill's `request_finished` answers in the release; block ids are made up."""
        blocks = [11, 12, 13]
        rank = headers.get("x-data-parallel-rank", "0")
        more = 90 if self._odd else 0
        reply: Params = {
            "do_remote_prefill": not self._odd,
            "do_remote_decode": self._odd,
            "remote_block_ids": blocks if self._release.answer_blocks == "flat" else [blocks],
            "remote_engine_id": f"{self.host}:6301",
            "remote_host": self.host,
            "remote_handshake_port": "6301",
            "remote_notify_port": "61005",
            "remote_dp_size": self.dp + more,
            "tp_size": self.tp + more,
            "transfer_id": "tx-answered" if self._odd else params.get("transfer_id"),
        }
        if self._release.answer_dp == "rank":
            dp_rank = int(rank) if rank.isdecimal() else 0
            reply |= {"remote_dp_rank": dp_rank + more, "remote_dp_rank_override": True, "remote_dp_size_local": self.dp + more}
        return reply


def _json(data: object) -> bytes:
    body = json.dumps(data, separators=(",", ":")).encode()  # as vLLM writes it: routers may tell its length of what they rewrote
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _events(answer: dict[str, Any], chat: bool) -> bytes:
    """The same as a stream: what was generated, then the end."""
    said = {"delta": {"role": "assistant", "content": "ok"}} if chat else {"text": "ok"}
    first = answer | {"object": "chat.completion.chunk" if chat else answer["object"]}
    pieces = [json.dumps(first | {"choices": [{"index": 0, "finish_reason": "length"} | said]}), "[DONE]"]
    events = [f"data: {piece}\n\n".encode() for piece in pieces]
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
