"""Where event faults act in a rank's process: around the sockets that the connector opens, and around `mori.io`.

Both wrappers are in place in every run and let everything through unless a fault is planned. They see what a rank
binds, dials and sends, which is half of the explanation when a message goes astray. `mori.io` may be the stand-in or the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcover.faults import EventFault
from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.driver.processes import HOST, Ports
from kvcover.real_backend.driver.reports import Post, SentNotice
from kvcover.real_backend.driver.trial import BlockTables, Role, Trial
from kvcover.real_backend.inside.private import Private

NOTICE_KINDS = ("drop-notice", "duplicate-notice", "delay-notice", "reorder-notice", "poison-notice", "misroute-notice",
                "replay-notice")  # fmt: skip
TRANSFER_KINDS = ("fail-transfer", "partial-transfer", "delay-transfer", "lose-completion", "early-completion", "sq-full")
_MORIIO = "vllm.distributed.kv_transfer.kv_connector.v1.moriio"
_GARBAGE = b"\xc1\xff\xfe"  # neither msgpack nor text
_INDEX = re.compile(r"([0-9a-f]{32})(?!.*[0-9a-f]{32})")
_EVERYWHERE = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]):")
_PORT = re.compile(r":(\d+)$")
_LINGER_MS = 2000
_FULL = "SQ full (planned fault)"
_Batch = tuple[str, str, int]
_Lists = tuple[list[int], list[int], list[int]]


class Injection:
    """The faults of one process of a DP rank. `bound` are its ports, `dialled` the handshake ports it went to, in order."""

    def __init__(self, trial: Trial, role: Role, dp: int, name: str, ports: dict[Role, Ports]) -> None:
        self.trial, self.role, self.dp, self.name, self.ports = trial, role, dp, name, ports
        self.bound: list[tuple[int, int]] = []
        self.dialled: list[tuple[int, int]] = []
        self.spoilt: dict[tuple[str, str, int], tuple[int, str]] = {}
        """When and how a fault spoilt the last batch of a kind, to a peer, by its last address here."""
        self.acted: list[tuple[int, str, str, str, int, int]] = []
        """When which fault acted, at which point, and its receiver, request and layer."""
        self.sent: list[SentNotice] = []
        self.layers: list[tuple[int, int]] = []
        """Address and bytes of each layer's cache."""
        self.owners: dict[int, str] = {}
        """Which rank listens on which port."""
        self.given: list[tuple[int, int, BlockTables]] = []
        """When which request had which blocks, by cache group, whenever that changed."""
        faults, book = trial.setup.faults, trial.book
        self._injector = SharedInjector(faults, book) if faults and book else None
        self._local = all(each.host == HOST for each in ports.values())
        """Whether all of the run is on this machine: then nobody else is listened to. Over several, sockets stay as they are."""
        self._secret = next((each.secret for each in ports.values()), b"")

    def wrap_sockets(self) -> None:
        """Put ours in the place of the socket factory, in every module of the connector that imported it."""
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name.startswith(_MORIIO) and hasattr(module, "make_zmq_socket"):
                module.make_zmq_socket = self._wrapped(module.make_zmq_socket)

    def wrap_transfers(self) -> None:
        """Let each session of `mori.io` pass by the planned transfer faults."""
        if self._injector is None or not self._injector.plans("transfer"):
            return
        engine: Any = importlib.import_module("mori.io").IOEngine
        create = engine.create_session

        def create_session(this: Any, local: Any, remote: Any) -> Any:
            session = create(this, local, remote)
            return None if session is None else _Session(self, session, local, remote)

        engine.create_session = create_session

    def acting(self, point: str, target: str, sender: str, receiver: str, request: int, layer: int = -1) -> list[EventFault]:
        """The faults that act on this event; they are noted."""
        if self._injector is None:
            return []
        faults = self._injector.event(point, target, sender, receiver, request, layer)
        self.acted += [(time.monotonic_ns(), str(fault), point, receiver, request, layer) for fault in faults]
        return faults

    def failed(self) -> list[Post]:
        """Which batches a fault failed, or left without a completion; not those that were posted again with success."""
        return [
            self.batch(at, kind, peer, address, text, planned=True) for (kind, peer, address), (at, text) in self.spoilt.items()
        ]

    def batch(self, at_ns: int, kind: str, peer: str, address: int, error: str, *, planned: bool = False, done_ns: int = 0) -> Post:
        """A post by its last byte in this rank's caches, which tells its layer and request."""
        layer, request = self.cell_of(address, at_ns)
        return Post(at_ns, kind, peer, request, layer, error, planned, done_ns)

    def peer_of(self, engine_key: str) -> str:
        """The rank of the other engine that registers under such a key: role:host:port:tp<r>:dp<d>."""
        tp, dp = (int(part[2:]) for part in engine_key.split(":")[-2:])
        return self.trial.endpoint("decode" if self.role == "prefill" else "prefill").rank_name(dp, tp)

    def owner(self, port: int) -> str:
        """The rank that listens on a port; empty if nobody does."""
        return self.owners.get(port, "")

    def _wrapped(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        notices = [port for ports in self.ports.values() for port in ports.notices]

        def make_zmq_socket(*args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(zip(("ctx", "path", "socket_type", "bind"), args, strict=False))
            path = str(kwargs.get("path", ""))
            found = _PORT.search(path)
            port = int(found[1]) if found else 0
            if self._local:
                kwargs["ctx"] = Private(kwargs["ctx"], self._secret, listens=bool(kwargs.get("bind")))
                kwargs["path"] = _EVERYWHERE.sub(f"tcp://{HOST}:", path) if kwargs.get("bind") else path
            socket = factory(*args[4:], **kwargs)
            if kwargs.get("bind"):
                self.bound.append((time.monotonic_ns(), port))
                return socket
            if port not in notices:
                self.dialled.append((time.monotonic_ns(), port))
                return socket
            return _NoticeSocket(self, socket, path[: found.start()] if found else path, port)

        return make_zmq_socket

    def dialling(self, context: Any) -> Any:
        """A ZMQ context of which sockets may dial those of this run."""
        return Private(context, self._secret, listens=False) if self._local else context

    def request_of(self, text: str) -> int:
        """The request that an id belongs to, -1 if that can't be told."""
        found = _INDEX.search(text)
        index = int(found[1], 16) if found else -1
        return index if index < len(self.trial.setup.requests) else -1

    def learn(self, tables: Mapping[int, BlockTables]) -> None:
        """Take in which requests got which blocks."""
        now = time.monotonic_ns()
        self.given += [(now, request, groups) for request, groups in tables.items()]

    def cell_of(self, address: int, at_ns: int | None = None) -> tuple[int, int]:
        """Layer and request of an address in this rank's cache, -1 where it is nobody's: of the last that had it, by then."""
        endpoint = self.trial.endpoint(self.role)
        for layer, (start, length) in enumerate(self.layers):
            if start <= address < start + length:
                group = endpoint.groups[endpoint.places[layer][0]]
                shape = group.shape
                unit = shape.unit_at(np.array([(address - start) * shape.units // length]))
                block = int(unit[0]) // shape.block_units % shape.num_blocks
                past = (row[1:] for row in reversed(self.given) if at_ns is None or row[0] <= at_ns)
                return layer, next((index for index, tables in past if block and block in tables[group.table]), -1)
        return -1, -1


class _NoticeSocket:
    """A dialled socket on which notices leave: each is decoded, and passes the planned faults."""

    def __init__(self, injection: Injection, socket: Any, host: str, port: int) -> None:
        self._injection, self._socket, self._host, self._port = injection, socket, host, port
        self._line: queue.SimpleQueue[tuple[float, bytes]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, payload: bytes, *args: Any, **kwargs: Any) -> Any:
        """Send one notice, or do with it what the faults say."""
        kind, request = self._read(payload)
        self._injection.sent.append(SentNotice(time.monotonic_ns(), kind, self._port, request))
        at, copies, port, delay, alone = payload, [0.0], self._port, 0.0, False
        for fault in self._injection.acting("notice", kind, self._injection.name, self._injection.owner(port), request):
            after = (fault.ms or 0.0) / 1e3
            if fault.kind == "drop-notice":
                copies = []
            elif fault.kind in ("duplicate-notice", "replay-notice"):
                copies.append(after)
            elif fault.kind in ("delay-notice", "reorder-notice"):
                delay, alone = after, fault.kind == "reorder-notice"
            elif fault.kind == "poison-notice":
                at = _GARBAGE
            elif fault.kind == "misroute-notice":
                port += fault.port or 0
        for copy in copies:
            if copy or alone or port != self._port:
                self._send_apart(at, port, copy + delay)
            elif delay or self._line is not None:
                self._send_in_line(at, delay)
            else:
                self._socket.send(at, *args, **kwargs)

    def _read(self, payload: bytes) -> tuple[str, int]:
        """Message kind and request of a notice. Older releases send a bare id as text."""
        msgpack = importlib.import_module("msgpack")
        data = None
        with contextlib.suppress(Exception):
            data = msgpack.loads(payload)
        if isinstance(data, dict):
            ids = f"{data.get('req_id', '')} {data.get('transfer_id', '')}"
            return str(data.get("type") or "remote_blocks"), self._injection.request_of(ids)
        text = payload.decode("utf-8", "replace")
        return ("write_done" if self._injection.role == "prefill" else "release"), self._injection.request_of(text)

    def _send_in_line(self, payload: bytes, delay_s: float) -> None:
        if self._line is None:
            self._line = queue.SimpleQueue()
            threading.Thread(target=self._work_off, args=(self._line,), daemon=True).start()
        self._line.put((time.monotonic() + delay_s, payload))

    def _work_off(self, line: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        socket = self._dial(self._port)
        while True:
            due, payload = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            socket.send(payload)

    def _send_apart(self, payload: bytes, port: int, delay_s: float) -> None:
        def send() -> None:
            time.sleep(delay_s)
            socket = self._dial(port)
            socket.send(payload)
            socket.close(linger=_LINGER_MS)

        threading.Thread(target=send, daemon=True).start()

    def _dial(self, port: int) -> Any:
        zmq: Any = importlib.import_module("zmq")
        context = zmq.Context.instance()
        socket = self._injection.dialling(context).socket(zmq.DEALER)
        socket.connect(f"{self._host}:{port}")
        return socket


def _status(code: str, message: str = "") -> Any:
    """A status that a fault says, of the library's own type: its `WaitAll` takes no other. `mori.io` doesn't export it."""
    library = importlib.import_module("mori.cpp")
    status = library.TransferStatus()
    status.Update(getattr(library.StatusCode, code), message)
    return status


class _Session:
    """A session of `mori.io` whose batches pass the planned faults."""

    def __init__(self, injection: Injection, session: Any, local: Any, remote: Any) -> None:
        self._injection, self._session = injection, session
        self._base = int(getattr(local, "data", 0))
        self._peer = injection.peer_of(str(remote.engine_key))
        self._full = 0
        self._refused: set[_Batch] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batch_write(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], uid: int) -> Any:
        return self._post("write", self._session.batch_write, list(local), list(remote), list(sizes), uid)

    def batch_read(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], uid: int) -> Any:
        return self._post("read", self._session.batch_read, list(local), list(remote), list(sizes), uid)

    def write(self, local: int, remote: int, size: int, uid: int) -> Any:
        return self._post("write", self._session.batch_write, [local], [remote], [size], uid)

    def read(self, local: int, remote: int, size: int, uid: int) -> Any:
        return self._post("read", self._session.batch_read, [local], [remote], [size], uid)

    def _post(self, kind: str, post: Callable[..., Any], local: list[int], remote: list[int], sizes: list[int], uid: int) -> Any:
        injection, last = self._injection, self._base + (local[-1] + sizes[-1] - 1 if local and sizes else 0)
        batch = (kind, self._peer, last)
        injection.spoilt.pop(batch, None)
        if self._full > 0:
            self._full -= 1
            return self._fail(batch, "ERR_RDMA_OP", _FULL)
        if batch in self._refused:  # the connector posts it once more: no new batch for a fault to act on
            self._refused.discard(batch)
            return post(local, remote, sizes, uid)
        layer, request = injection.cell_of(last) if local else (-1, -1)
        sender, receiver = (injection.name, self._peer) if kind == "write" else (self._peer, injection.name)
        result = None
        for fault in injection.acting("transfer", kind, sender, receiver, request, layer):
            result = self._fault(fault, batch, lambda lists: post(*lists, uid), (local, remote, sizes))
        return post(local, remote, sizes, uid) if result is None else result

    def _fault(self, fault: EventFault, batch: _Batch, post: Callable[[Any], Any], lists: _Lists) -> Any:
        delay_s = (fault.ms or 0.0) / 1e3
        if fault.kind == "fail-transfer":
            return self._fail(batch, fault.status or "ERR_RDMA_OP", "failed by a planned fault")
        if fault.kind == "partial-transfer":
            _finished(post(_part(lists, fault.fraction or 0.5)))
            return self._fail(batch, "ERR_RDMA_OP", "failed in part by a planned fault")
        if fault.kind == "sq-full":
            self._full = (fault.times or 1) - 1
            self._refused.add(batch)
            return self._fail(batch, "ERR_RDMA_OP", _FULL)
        if fault.kind == "lose-completion":
            post(lists)
            self._injection.spoilt[batch] = (time.monotonic_ns(), "its completion was lost by a planned fault")
            return _status("IN_PROGRESS")
        if fault.kind == "early-completion":
            _later(delay_s, lambda: post(lists))
            return _status("SUCCESS")
        status = _status("IN_PROGRESS")
        _later(delay_s, lambda: _become(status, _finished(post(lists))))
        return status

    def _fail(self, batch: _Batch, error: str, message: str) -> Any:
        self._injection.spoilt[batch] = (time.monotonic_ns(), message)
        return _status(error, message)


def _later(delay_s: float, act: Callable[[], Any]) -> None:
    timer = threading.Timer(delay_s, act)
    timer.daemon = True
    timer.start()


def _part(lists: _Lists, fraction: float) -> _Lists:
    """The first `fraction` of a batch's bytes."""
    left = int(sum(lists[2]) * fraction)
    local, remote, sizes = [], [], []
    for here, there, size in zip(*lists, strict=True):
        if left > 0:
            local.append(here)
            remote.append(there)
            sizes.append(min(size, left))
            left -= size
    return local, remote, sizes


def _become(status: Any, other: Any) -> None:
    """Let one status say what another says."""
    status.Update(other.Code(), other.Message())


def _finished(status: Any) -> Any:
    """Wait for a batch that was really posted."""
    while not (status.Succeeded() or status.Failed()):
        time.sleep(0.0005)
    return status
