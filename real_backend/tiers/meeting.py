"""How processes that torchrun started find each other, and what connects them to the one that leads the run."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from kvcover.real_backend.driver.processes import HOST, Child, ProcessDied
from kvcover.real_backend.driver.reports import Planned
from kvcover.real_backend.driver.spool import Spool
from kvcover.real_backend.driver.wire import Wire


class Link(Child):
    """A rank or a scheduler in another process, perhaps on another node, by its connections."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.planned_death = False
        self.planned_stop = False

    def close(self) -> None:
        for part in ("steps", "questions"):
            if hasattr(self, part):
                getattr(self, part).close()

    def signal(self, number: signal.Signals) -> None:
        """Send the process, which is on this node, a signal."""
        os.kill(self.pid, number)

    def _died(self) -> ProcessDied:
        return ProcessDied(self.name, "closed its connection")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all processes share: torchrun's store, and who this one is."""

    store: Any
    rank: int
    size: int
    local_rank: int

    def tell(self, key: str, value: Any) -> None:
        """Publish something."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """Wait for what another process publishes."""
        return json.loads(self.store.get(key))


def join(case: str) -> Meeting:
    """Join torchrun's rendezvous for a case, and hide it from vLLM, whose worlds are smaller: one TP group each."""
    torch: Any = importlib.import_module("torch")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    store, rank, size = next(iter(torch.distributed.rendezvous("env://")))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"):
        os.environ.pop(name, None)
    return Meeting(torch.distributed.PrefixStore(f"kvcover/{case}", store), rank, size, local_rank)


def own_host(test: bool) -> str:
    """Return the address under which other nodes reach this one: `KVCOVER_HOST_IP`, else the one towards torchrun's master."""
    if named := os.environ.get("KVCOVER_HOST_IP"):
        return named
    if test:
        return HOST
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", HOST), 9))
        return str(probe.getsockname()[0])


def newcomers(listener: Listener, key: bytes) -> Iterator[tuple[Wire, Any]]:
    """Whoever connects and knows the key, with its first message, without end.

    Others are sent away, and one that says nothing is in nobody's way: each has a thread of its own.
    """
    admitted: queue.SimpleQueue[tuple[Wire, Any]] = queue.SimpleQueue()

    def admit(connection: Connection) -> None:
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            wire = Wire(connection)
            admitted.put((wire, wire.recv()))
        except (AuthenticationError, EOFError, OSError):
            connection.close()

    def accept() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(target=admit, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="newcomers").start()
    return (admitted.get() for _ in itertools.count())


class Steps(Wire):
    """A scheduler's connection: the steps that it makes, of which vLLM makes pickles, stay on this node."""

    def __init__(self, connection: Connection, spool: Spool) -> None:
        super().__init__(connection)
        self._spool = spool

    def send(self, value: Any) -> None:
        super().send(replace(value, output=self._spool.put(value.output)) if isinstance(value, Planned) else value)
