"""What a rank's threads, its log and its control messages tell of it, without changing any of it."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kvcover.real_backend.driver.reports import Escaped, Post, RankReport
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.inside.mori_kind import landed_ns
from kvcover.real_backend.inside.raising import escaped

_MOST_CAUGHT = 50


class Watch:
    """Records what a worker's threads see, without changing it."""

    def __init__(self, name: str, injection: Injection) -> None:
        self._name = name
        self._injection = injection
        self._notices: list[tuple[int, dict[str, Any]]] = []
        self._warnings: list[str] = []
        self._caught: dict[tuple[str, str, str], Escaped] = {}
        self.thread_errors: list[Escaped] = []
        handler = _Collector(self._warnings, self._logged)
        logger = logging.getLogger("vllm")
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        threading.excepthook = self._thread_died

    def listen(self, connector: Any) -> None:
        """Record each control message on its way into the connector's handler."""
        wrapper = connector.connector_worker.moriio_wrapper
        handle = wrapper._handle_message

        def observed(message: bytes) -> None:
            self._notices.append((time.monotonic_ns(), _decode(message)))
            handle(message)

        wrapper._handle_message = observed

    def report(self) -> RankReport:
        wrote: dict[str, tuple[tuple[int, int], ...]] = defaultdict(tuple)
        batches: list[Post] = []
        for post in list(importlib.import_module("mori.io").IOEngine.posted):
            error = "" if post.status.Succeeded() else str(post.status.Message() or "not complete")
            peer = self._injection.peer_of(post.remote_engine)
            done_ns = 0 if error else landed_ns(post.status, post.local, post.at_ns)
            batches.append(self._injection.batch(post.at_ns, post.kind, peer, post.local, error, done_ns=done_ns))
            if post.kind == "write" and not error:
                wrote[post.remote_engine] += post.remote_ranges
        return RankReport(
            name=self._name,
            notices=tuple(self._notices),
            batches=(*batches, *self._injection.failed()),
            wrote_to=dict(wrote),
            warnings=tuple(self._warnings),
            bound=tuple(self._injection.bound),
            dialled=tuple(self._injection.dialled),
            acted=tuple(self._injection.acted),
            sent=tuple(self._injection.sent),
            caught=tuple(self._caught.values()),
        )

    def _thread_died(self, args: threading.ExceptHookArgs) -> None:
        thread = args.thread.name if args.thread else "thread"
        if args.exc_value is not None:
            self.thread_errors.append(escaped(self._name, thread, args.exc_value))

    def _logged(self, where: str, error: BaseException) -> None:
        """Keep an error that the connector caught and only logged; it ended the thread's work if code or machine is broken."""
        found = escaped(self._name, where, error)
        if found.broken or found.machine:
            self.thread_errors.append(found)
        elif len(self._caught) < _MOST_CAUGHT:
            self._caught.setdefault((found.call, found.kind, found.place), found)


class _Collector(logging.Handler):
    def __init__(self, into: list[str], on_error: Callable[[str, BaseException], None]) -> None:
        super().__init__(logging.WARNING)
        self._into, self._on_error = into, on_error

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        errors = [each for each in record.args or () if isinstance(each, BaseException)] if isinstance(record.args, tuple) else []
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            errors.append(record.exc_info[1])
        self._into.append(text)
        if errors and "moriio" in record.pathname:
            self._on_error(record.funcName, errors[-1])


def _decode(message: bytes) -> dict[str, Any]:
    msgpack = importlib.import_module("msgpack")
    try:
        data = msgpack.unpackb(message)
    except Exception:  # anything may come in from a socket; the connector judges it, not we
        data = None
    if isinstance(data, dict):
        return dict(data)
    return {"type": "text", "transfer_id": message.decode("utf-8", "replace")}
