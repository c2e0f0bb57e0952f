"""What is the machine's and what the connector's: limits, errors, lost time, and what crosses a socket."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcover.real_backend.driver.harness import refuse_foreign
from kvcover.real_backend.driver.lookout import Lookout
from kvcover.real_backend.driver.processes import Child, reserve_ports
from kvcover.real_backend.driver.reports import Answer, Escaped, Planned, Post, RankReport, SchedulerReport, StepReport, Updated
from kvcover.real_backend.driver.spool import Spool
from kvcover.real_backend.driver.trial import Trial
from kvcover.real_backend.driver.wire import Wire, decode, encode
from kvcover.real_backend.inside.raising import escaped, raised_by
from kvcover.real_backend.machine import room
from kvcover.real_backend.tiers.connector import _run_steadily
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.cache.wrong import WrongCells
from kvcover.sim.errors import MachineError, TierError, TooBusy
from kvcover.sim.results.record import KeyRead, LegReads
from kvcover.sim.scenario.scenario import build

SMALL = {"release": "0.33.0", "model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}}


# -- whose an error is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
)
def test_what_a_machine_lacks_is_the_machines_wherever_it_is_met(error: Exception) -> None:
    found = escaped("P0", "save_kv_layer", error)
    assert found.machine
    with pytest.raises(MachineError, match="the run says nothing") as raised:
        refuse_foreign(to_trial(build(SMALL)), [found])
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    "error", [KeyError("remote_tp_size"), AssertionError("no blocks"), RuntimeError("not registered"), TimeoutError()]
)
def test_what_the_connector_raises_stays_an_outcome(error: Exception) -> None:
    found = escaped("P0", "save_kv_layer", error)
    assert not found.machine
    refuse_foreign(to_trial(build(SMALL)), [found])


def test_an_error_outside_the_connector_is_no_outcome_unless_a_planned_fault_of_a_rank_explains_it() -> None:
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        found = raised_by("P1", error)
    assert (found.call, found.foreign) == ("outside the connector", True)
    with pytest.raises(MachineError, match="Connection closed by peer"):
        refuse_foreign(to_trial(build(SMALL)), [found])
    refuse_foreign(to_trial(build(SMALL | {"faults": ["crash-rank:P0,ms=5"]})), [found])


def test_what_imitates_vllms_scheduler_speaks_for_it() -> None:
    assert not raised_by("decode scheduler 0", AssertionError("finished_recving names unknown request x")).foreign


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: needs /proc")
@pytest.mark.parametrize("strangers", [True, False])
def test_a_port_in_use_is_the_machines_if_no_rank_of_the_engine_has_it(strangers: bool) -> None:
    """A process of this session is as a rank of the same engine; one of another session is a stranger."""
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    look = (
        "import errno, subprocess, sys\n"
        "from kvcover.real_backend.inside.raising import what_machine_lacks\n"
        f"holder = subprocess.Popen([sys.executable, '-c', {code!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,"
        f" start_new_session={strangers})\n"
        "port = int(holder.stdout.readline())\n"
        "print(bool(what_machine_lacks(OSError(errno.EADDRINUSE, f\"Address already in use (addr='tcp://127.0.0.1:{port}')\"))))\n"
        "holder.communicate()\n"
    )
    command = ["sh", "-c", f'{sys.executable} -c "$0"; true', look]
    done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout == f"{strangers}\n", done.stderr


# -- room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "value", "told"),
    [
        ("RLIMIT_NOFILE", 64, "open files a process, and the limit is 64"),
        ("RLIMIT_AS", 2_000_000_000, "MB of addresses, and the limit is 2000 MB"),
        ("RLIMIT_FSIZE", 4_000_000, "shared memory is a file"),
        ("RLIMIT_NPROC", 60, "processes and threads"),
    ],
)
def test_a_limit_that_is_too_low_is_told_before_a_run(limit: str, value: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (value, value) if which == getattr(resource, limit) else real(which))
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TierError, match=told) as raised:
        room.check_room(4, 4)
    assert raised.value.exit_code == 2


def test_little_shared_memory_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_free_shared_mb", lambda: 20)
    with pytest.raises(TierError, match="26 MB free in /dev/shm, and there are 20"):
        room.check_room(4, 4)


def test_a_soft_limit_is_raised_and_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: asked.append(values))
    assert room._raise_soft_limit(170) == 170
    assert asked == [(170, 4096)]


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", 2), ("0.0.0.0", 2), ("127.0.0.2", 2), ("::", 10)])
def test_a_port_is_taken_whatever_address_it_is_held_on(address: str, family: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    with socket.socket(family) as holder:
        with reserve_ports() as (first, _):
            pass
        holder.bind((address, first.handshake + 7))
        holder.listen()
        with reserve_ports() as (second, _):
            assert second.handshake != first.handshake


# -- lost time ----------------------------------------------------------------------------------------------------


def child(pid: int, planned_stop: bool) -> Child:
    return cast(Child, SimpleNamespace(name="P0", pid=pid, planned_stop=planned_stop, planned_death=False))


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: needs /proc")
@pytest.mark.parametrize("planned", [False, True])
def test_a_stopped_process_is_seen_unless_that_was_planned(planned: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as asleep:
        asleep.send_signal(19)
        with Lookout(lambda: [child(asleep.pid, planned)], 1.0) as lookout:
            time.sleep(0.6)
        asleep.kill()
    assert lookout.trouble == ("" if planned else "process P0 is stopped")


def test_a_late_clock_is_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lookout(list, 1.0) as healthy:
        time.sleep(0.5)
    assert healthy.trouble == ""
    healthy.check()
    for begun, told in ((True, "too busy"), (False, "")):
        times = iter([0.0, 0.1, 0.2, 1.15, 1.25])  # once 0.85 s late
        monkeypatch.setattr(time, "monotonic", lambda times=times: next(times))
        starved = Lookout(list, 1.0)
        looks = iter([False] * 4)
        monkeypatch.setattr(starved._over, "wait", lambda _limit, looks=looks: next(looks, True))
        if begun:
            starved.begin()
        starved.run()
        assert told in starved.busy
        starved.check()  # what ended well did so in spite of it
        if begun:
            with pytest.raises(MachineError, match="too busy"):
                starved.check(timeless=False)
        else:
            assert starved.busy == ""


# -- what crosses a socket ----------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, -1, 1 << 80, 1.5, "text", b"\x00bytes", [1, [2]], (1, (2,)), {3, 4}, frozenset({"a"}), {}, {1: "one", (2, 3): None},
    ("step", (7, (1,), {0: ((1, 2), (0, 3))})), StepReport({"a"}, set(), {"b"}, {9}, Escaped("P0", "call", "KeyError", "x")),
    RankReport("P0", ((5, {"type": "remote_blocks"}),), (Post(1, "write", "D0", 0, 1),), {"k": ((1, 2),)},
               wrong=(WrongCells("D0", 0, {"partial": 1}, ["D0 layer 0"]),)),
    SchedulerReport("P", {0: LegReads((KeyRead("tp_size", "a.py", 3, "f", "x", "get", True),), ("a.py:4",))}),
    Planned(7, {"a": 16}, {"a": "RUNNING"}, {"a": ((1, 2),)}, {"a": 31}),
    Updated(frozenset({"a"}), frozenset(), frozenset({9}), (Answer("a", "length", {"tp_size": 1}),), {}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


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


# -- another attempt ----------------------------------------------------------------------------------------------


class _Busy:
    """A harness whose first attempts the machine spoils, after a fault of a key has fired in each."""

    def __init__(self, spoilt: int) -> None:
        self.spoilt, self.limits, self.fired = spoilt, list[float](), list[int]()

    def run(self, trial: Trial) -> Any:
        self.limits.append(trial.limits.transfer_s)
        trial.keys.fired[0] += 1
        self.fired.append(trial.keys.fired[0])
        if len(self.limits) <= self.spoilt:
            raise TooBusy("--tier", "too busy")
        return SimpleNamespace(stalled=False)


@pytest.mark.parametrize("spoilt", [0, 1, 2, 3])
def test_what_a_machine_spoilt_is_run_again_with_longer_timers_and_counts_its_faults_anew(spoilt: int) -> None:
    busy = _Busy(spoilt)
    planned = to_trial(build(SMALL | {"faults": ["fail-leg:decode"]}))
    before = planned.keys.fired[0]
    if spoilt == 3:
        with pytest.raises(MachineError):
            _run_steadily(cast(Any, busy), planned, planned.ranks)
    else:
        ran, _ = _run_steadily(cast(Any, busy), planned, planned.ranks)
        assert ran.limits.transfer_s == busy.limits[-1]
    assert len(busy.limits) == min(spoilt + 1, 3)
    assert busy.limits == sorted(set(busy.limits))  # each longer than the one before
    assert busy.fired == [before + 1] * len(busy.fired)
