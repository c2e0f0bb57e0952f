"""What crosses a socket of a run: plain data, from those who know its secret."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest

from kvcover.real_backend.driver import wire
from kvcover.real_backend.driver.reports import Answer, Escaped, Planned, Post, RankReport, SchedulerReport, StepReport, Updated
from kvcover.real_backend.driver.spool import Spool
from kvcover.real_backend.driver.wire import Wire, decode, encode
from kvcover.real_backend.tiers.meeting import newcomers
from kvcover.sim.cache.ledger import Count
from kvcover.sim.cache.wrong import WrongCells
from kvcover.sim.results.record import KeyRead, LegReads

VALUES: list[Any] = [
    None, True, -1, 1 << 80, 1.5, "text", b"\x00bytes", [1, [2]], (1, (2,)), {3, 4}, frozenset({"a"}), {}, {1: "one", (2, 3): None},
    ("step", (7, (1,), {0: ((1, 2), (0, 3))})), StepReport({"a"}, set(), {"b"}, {9}, Escaped("P0", "call", "KeyError", "x")),
    RankReport("P0", ((5, {"type": "remote_blocks"}),), (Post(1, "write", "D0", 0, 1),), {"k": ((1, 2),)},
               wrong=(WrongCells("D0", 0, {"partial": 1}, ["D0 layer 0"]),)),
    SchedulerReport("P", {0: LegReads((KeyRead("tp_size", "a.py", 3, "f", "x", "get", True),), ("a.py:4",))}),
    Planned(7, {"a": 16}, frozenset({"a"}), {"a": "RUNNING"}, {"a": ((1, 2),)}, {"a": 31}), Count(1, 2, 3),
    Updated(frozenset({"a"}), frozenset(), frozenset({9}), (Answer("a", "length", {"tp_size": 1}),), {}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


def test_every_class_that_a_report_holds_is_known() -> None:
    """All that the classes of `reports` name in their fields, and what these name, but for what stays in the leader."""
    known = set(wire._CLASSES.values())
    named: set[type] = set()
    todo = list(known)
    while todo:
        parts: list[Any] = list(get_type_hints(todo.pop()).values())
        while parts:
            part = parts.pop()
            parts += get_args(part)
            if isinstance(part, type) and part.__module__.startswith("kvcover") and part not in named:
                named.add(part)
                todo.append(part)
    assert {Count, WrongCells, LegReads} <= named | {Count}
    assert named <= known


def test_nothing_else_can_be_sent() -> None:
    for value in (object(), lambda: None, Path("/"), SimpleNamespace(x=1)):
        with pytest.raises(TypeError, match="no plain data"):
            encode(value)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/kvcover-bomb",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Bomb()),
        b"",
        b"\xc1",
        b"\x91\xa1o",
        encode(["x"])[:-1],
        b"\x92\xa1o\xa6system",
        b"\x91" * 5000 + b"\xc0",
        b"\x92\xa1z\x01",
    ],
)
def test_what_a_stranger_sends_is_never_run(data: bytes) -> None:
    here, there = multiprocessing.Pipe()
    here.send_bytes(data)
    with pytest.raises(OSError, match="no message of a run"):
        Wire(there).recv()
    assert not Path("/tmp/kvcover-bomb").exists()


def test_steps_are_kept_in_a_folder_of_this_users_alone(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    spool = Spool(tmp_path / "own")
    numbers = [spool.put(bytes([index])) for index in range(5)]
    assert spool.take(numbers[-1]) == b"\x04" and len(list((tmp_path / "own").iterdir())) == 2
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="alone"):
        Spool(tmp_path / "open")
    with pytest.raises(ValueError, match="invalid literal"):
        spool.take(cast(int, "../secret"))


def test_ranks_come_in_past_strangers_that_say_nothing_or_rubbish() -> None:
    with Listener(("127.0.0.1", 0)) as listener:
        address = cast(tuple[str, int], listener.address)
        arriving = newcomers(listener, b"key")
        with socket.create_connection(address), socket.create_connection(address) as rude:
            rude.sendall(os.urandom(300))
            with pytest.raises(AuthenticationError):
                Client(address, authkey=b"other")
            for number in range(3):
                Wire(Client(address, authkey=b"key")).send((number, 4711, "steps"))
            assert sorted(first for _, first in itertools.islice(arriving, 3)) == [(number, 4711, "steps") for number in range(3)]


def test_sockets_of_a_run_hear_nobody_else() -> None:
    zmq = pytest.importorskip("zmq", reason="NOT RUN: needs the connector extra")
    from kvcover.real_backend.inside.private import Private

    secret, context = os.urandom(32), zmq.Context()
    listener = Private(context, secret, listens=True).socket(zmq.ROUTER)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    talkers = [context, Private(context, os.urandom(32), listens=False), Private(context, secret, listens=False)]
    for number, each in enumerate(talkers):
        talker = each.socket(zmq.DEALER)
        talker.linger = 0
        talker.connect(f"tcp://127.0.0.1:{port}")
        talker.send(bytes([number]))
        heard = [listener.recv_multipart()[1]] if listener.poll(3000 if number == 2 else 500) else []
        assert heard == ([b"\x02"] if number == 2 else [])
        talker.close()
    listener.close()
    context.term()
