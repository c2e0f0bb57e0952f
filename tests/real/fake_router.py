"""A router for tests: `python fake_router.py HOW PORT DISCOVERY NOTES`. HOW says what is wrong with it, `works` that nothing is.

Written from the wire up, so that it shares no code with what records it. NOTES gets its pid, that of a child which it starts,
and its ports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

ENGINES: dict[str, list[dict[str, Any]]] = {"P": [], "D": []}


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def registrations(connection: socket.socket) -> None:
    """A peer's ZMTP: greeting, a command, then one short message again and again."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32))
    assert read(connection, 64)[:10] == b"\xff" + bytes(8) + b"\x7f"
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
    connection.sendall(bytes([4, len(ready)]) + ready)
    while True:
        flags, size = read(connection, 2)
        body = read(connection, size)
        if flags & 4 == 0:
            told = msgspec.msgpack.decode(body)
            known = ENGINES[told["type"]]
            if told["http_address"] not in [each["http_address"] for each in known]:
                known.append(told)


def serve_registrations(server: socket.socket) -> None:
    def one(connection: socket.socket) -> None:
        try:
            registrations(connection)
        except (EOFError, OSError):
            connection.close()

    while True:
        threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()


def ask(engine: dict[str, Any], path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "X-Request-Id": "fake-" + "0" * 32}
    with urllib.request.urlopen(urllib.request.Request(f"http://{engine['http_address']}{path}", data, fields)) as answer:
        text = answer.read()
    return {} if body["stream"] else dict(json.loads(text))


class Handler(BaseHTTPRequestHandler):
    how = "works"

    def log_message(self, *_args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.how == "dies-later":
            print("panicked at a request", file=sys.stderr, flush=True)
            os._exit(101)
        if self.how == "hangs":
            time.sleep(1000)
        if self.how == "unregistered" or not (ENGINES["P"] and ENGINES["D"]):
            self.answer(503, {"error": "no engines are registered"})
            return
        if self.how == "no-legs":
            self.answer(200, {})
            return
        prefill, decode = ENGINES["P"][0], ENGINES["D"][0]
        common = {"transfer_id": f"tx-{time.monotonic_ns()}"}
        first = {"do_remote_decode": True, "remote_tp_size": decode["tp_size"], "remote_dp_size": 1, **common}
        second = {"do_remote_prefill": True, "remote_tp_size": prefill["tp_size"], "remote_dp_size": prefill["dp_size"], **common}
        if self.how == "no-params":
            first = {}
        reply = ask(prefill, self.path, body | {"stream": False, "kv_transfer_params": first})
        if prefill["transfer_mode"] == "READ":
            second |= {"remote_block_ids": reply["kv_transfer_params"]["remote_block_ids"]}
        ask(decode, self.path, body | {"kv_transfer_params": second})
        self.answer(200, {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(how: str, port: int, discovery: int, notes: str) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # what a router leaves behind must go too
    with open(notes, "a") as file:
        file.write(f"{os.getpid()} {child.pid} {port} {discovery}\n")
    if how == "port-taken" and len(Path(notes).read_text().splitlines()) < 3:
        print("Error: Address already in use (os error 98)", file=sys.stderr, flush=True)
        sys.exit(1)
    if how == "dies":
        print("no such connector: moriio", file=sys.stderr, flush=True)
        sys.exit(3)
    if how == "deaf":
        time.sleep(1000)
    Handler.how = how
    threading.Thread(target=serve_registrations, args=(socket.create_server(("127.0.0.1", discovery)),), daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
