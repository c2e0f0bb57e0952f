"""What is done to real runs, as data: the command, what is done, and how it may end.

A verdict may only be the right one. What a machine spoilt is run again, so that an attack that ends soon may end well.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.real.acts import (
    Act,
    at_work,
    drop_shared_memory,
    flap,
    freeze,
    lower,
    remove,
    rubbish,
    send,
    steal,
    throttle,
    to_any_port,
    to_local_sockets,
    use_up,
    weaken,
)  # fmt: skip

HANGS = signal.SIGHUP, signal.SIGTERM, signal.SIGINT
CODES = {signal.SIGHUP: 129, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
ROOT = os.geteuid() == 0
V1 = os.access("/sys/fs/cgroup/cpu/cpu.cfs_period_us", os.R_OK) and ROOT
FREEZER = os.access("/sys/fs/cgroup/freezer", os.W_OK) and ROOT

SIZES = ("--prefill", "tp=2", "--decode", "tp=2")
MLA = ("--model", "layers=2,mla=64+16")
HEADS = ("--model", "layers=2,kv_heads=8,head_dim=8")
LONG = ("--set", "generate_ns=2000000000")
LATER = ("--set", 'requests=[{"arrival_ns":1000000000}]')
"""The request comes when whoever waits for the run to listen has begun."""
CONNECTOR = ("--tier", "connector")
RUN = ("run", *CONNECTOR, "--release", "0.33.0", *SIZES, *MLA)
WRITE_27 = ("run", *CONNECTOR, "--release", "0.27.0", *SIZES, *MLA, *LONG)
READ_27 = ("run", *CONNECTOR, "--release", "0.27.0", "--mode", "read", *SIZES, *HEADS, *LONG)
READ_33 = ("run", *CONNECTOR, "--release", "0.33.0", "--mode", "read", *SIZES, *HEADS, *LONG)
MATRIX = ("matrix", *CONNECTOR, "--release", "0.33.0", "--mode", "write", "--prefill", "1,2", "--decode", "1,2", *MLA)
CONFIRM = ("confirm", *CONNECTOR, "--before", "0.26.0", "--after", "0.27.0", *SIZES, *MLA)
EXPLORE = ("explore", *CONNECTOR, "--vllm", "0.33.0", "--seeds", "6")
CORPUS = ("corpus", "vllm#47764", *CONNECTOR)
GOOD = "ok: every decode rank had its cells at go"

KVCOVER = ("-m", "kvcover")
_LAUNCH = """
import sys
from kvcover.real_backend.tiers.hardware import launch
from kvcover.sim.cli import fail
from kvcover.sim.errors import InputError
from kvcover.sim.scenario.scenario import build
from kvcover.sim.signals import Ended, unwind_on_signals
sizes = {"prefill": {"tp": 2}, "decode": {"tp": 2}, "model": "layers=2,mla=64+16", "fabric": "loopback", "generate_ns": 2000000000}
unwind_on_signals()
try:
    result = launch(build(sizes | {"release": "0.33.0"}), "0.33.0", ("--loopback-test", "--no-self-test"), 280.0)
    print(f"{result.outcome}: every decode rank had its cells at go")
except InputError as error:
    fail(str(error), error.exit_code)
except Ended as end:
    fail("ended", 128 + end.number)
"""
TORCHRUN = ("-c", _LAUNCH)
"""What `kvcover run --tier hardware` does where there is the hardware, on this machine's memory over the loopback."""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--kvcover", "--kvcover-tier", "connector", "--kvcover-vllm", "0.33.0")
_SCENARIO = (
    """echo '{"release":"0.33.0","prefill":{"tp":2},"decode":{"tp":2},"model":"layers=2,mla=64+16","generate_ns":2000000000,"""
    """"expect":{"outcome":"ok"}}' >s.json"""
)

LISTENERS = {
    "READ of 0.27.0": READ_27, "WRITE of 0.24.0": ("run", *CONNECTOR, "--release", "0.24.0", *SIZES, *MLA, *LONG), "matrix": MATRIX,
    "confirm": CONFIRM, "explore": EXPLORE, "corpus": CORPUS,
}  # fmt: skip
"""Commands that make real runs, each in its way."""


@dataclass(frozen=True)
class Attack:
    """`codes` are those that it may exit with; 0 only if it says `good`. `says` is in what is printed."""

    name: str
    act: Act | None = None
    codes: tuple[int, ...] = (0, 3)
    shell: str = ""
    says: str = ""
    env: tuple[tuple[str, str], ...] = ()
    needs: bool = True
    command: tuple[str, ...] = (*RUN, *LONG)
    program: tuple[str, ...] = KVCOVER
    good: str = GOOD
    whole: tuple[str, ...] = ()
    """Files of the current folder that must be whole if they are there."""


# -- a run -------------------------------------------------------------------------------------------------------

KINDS = ("P scheduler", "P0", "P1", "D scheduler", "D0", "D1")
"""The children of a run in the order in which they are forked."""


def _signals() -> Iterator[Attack]:
    for moment in ("importing", "forked", "running"):
        for number in (*HANGS, signal.SIGKILL):
            yield Attack(f"{number.name} while {moment}", send(number, "driver", moment=moment), (CODES[number],))
    for number, word in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        for which in ("guard", "server"):
            yield Attack(f"{which} {word}", send(number, which))
        for index, name in enumerate(KINDS):
            yield Attack(f"{name} {word}", send(number, "children", index))
            yield Attack(f"{name} {word} while it waits, READ of 0.27.0", send(number, "children", index, after_s=1.0),
                         command=READ_27)  # fmt: skip
    yield Attack("all stopped", send(signal.SIGSTOP, "children", -1))
    yield Attack("a scheduler stopped at the start", send(signal.SIGSTOP, "children", 3, "forked"))
    yield Attack("a rank stopped at the start", send(signal.SIGSTOP, "children", 1, "forked"), command=WRITE_27)
    yield Attack("a rank killed at the start", send(signal.SIGKILL, "children", 5, "forked"), command=READ_27)
    for which, index in (("children", 0), ("children", 2), ("children", -1), ("driver", 0), ("server", 0)):
        yield Attack(f"{which} {index} stopped for 2 s", send(signal.SIGSTOP, which, index, again_s=2.0))
    yield Attack("killed as by no memory", send(signal.SIGKILL, "children", -1))
    yield Attack("ended politely", send(signal.SIGTERM, "children", -1))
    yield Attack("Ctrl-C for a rank alone", send(signal.SIGINT, "children", 1), command=READ_33)
    yield Attack("a rank's bad access", send(signal.SIGSEGV, "children", 4), shell="ulimit -c unlimited", command=WRITE_27)
    yield Attack("a scheduler aborts", send(signal.SIGABRT, "children", 0), command=READ_27)
    yield Attack("a server ended at the fork", send(signal.SIGTERM, "server", 0, "forked"), (3,), says="is gone")
    yield Attack("a guard hung up", send(signal.SIGHUP, "guard"), (3,), says="is gone")
    yield Attack("a user's signal", send(signal.SIGUSR1, "driver"), (-signal.SIGUSR1,))
    yield Attack("children are never waited for", shell="trap '' CHLD", codes=(0,))
    yield Attack("a rank killed, children never waited for", send(signal.SIGKILL, "children", 2), shell="trap '' CHLD")
    yield Attack("all signals ignored", shell="trap '' PIPE INT TERM HUP", codes=(0,))


_LONG_TMPDIR = "TMPDIR=$TMPDIR/$(printf x%.0s $(seq {})); mkdir $TMPDIR"
_BUT = 'exec unshare -m sh -c \'mount -t tmpfs {} && exec "$@"\' sh "$@"'
"""The command with something else mounted."""


def _limits() -> Iterator[Attack]:
    yield Attack("64 files", None, (2,), "ulimit -n 64", "open files a process, and the limit is 64")
    yield Attack("128 files", None, (2,), "ulimit -n 128", "open files")
    yield Attack("64 files that may be more", None, (0,), "ulimit -S -n 64")
    yield Attack("500 files are open", None, (0,), "for i in $(seq 500); do exec {fd}</dev/null; done")
    yield Attack("2 GB of addresses", None, (2,), "ulimit -v 2000000", "MB of addresses")
    yield Attack("files of 4 MB", None, (2,), "ulimit -f 4000", "shared memory is a file")
    yield Attack("5 s of CPU time", None, (2, 3), "ulimit -t 5")
    yield Attack("a stack of 256 kB", None, (0, 3), "ulimit -s 256")
    yield Attack("no locked memory, no queued signals", None, (0,), "ulimit -l 0; ulimit -i 0; ulimit -q 0")
    yield Attack("TMPDIR of 63 characters", None, (0,), _LONG_TMPDIR.format(45))
    yield Attack("TMPDIR of 200 characters", None, (0,), _LONG_TMPDIR.format(182))
    yield Attack("TMPDIR that is not there", None, (0,), env=(("TMPDIR", "/no/such/folder"),))
    yield Attack("loopback is down", None, (2,), 'exec unshare -n -- "$@"', "nothing can be reached there", needs=ROOT)
    yield Attack("no /proc", None, (2,), _BUT.format("x /proc"), "/proc is not there", needs=ROOT)
    yield Attack("/dev/shm of 20 MB", None, (2,), _BUT.format("-o size=20m x /dev/shm"), "docker run --shm-size", needs=ROOT)
    yield Attack("/dev/shm that is read-only", None, (2,), _BUT.format("-o ro x /dev/shm"), "can't be written", needs=ROOT)
    yield Attack("/dev/shm of 60 MB", None, (0,), _BUT.format("-o size=60m x /dev/shm"), needs=ROOT)
    yield Attack("/tmp of 8 MB", None, (0,), _BUT.format("-o size=8m x /tmp"), needs=ROOT)
    yield Attack("a rank gets no more files", lower("children", 1, resource.RLIMIT_NOFILE, 10, "forked"))
    yield Attack("decode gets no more files", lower("children", 4, resource.RLIMIT_NOFILE, 10), command=READ_27)
    yield Attack("a server gets no more files", lower("server", 0, resource.RLIMIT_NOFILE, 12, "importing"))
    yield Attack("a rank gets no more memory", lower("children", 1, resource.RLIMIT_AS, 1 << 20))
    yield Attack("a rank gets 1 s of CPU time", lower("children", 2, resource.RLIMIT_CPU, 1), command=READ_33)
    yield Attack("nothing may be written", lower("driver", 0, resource.RLIMIT_FSIZE, 0), (2, 3), says="File too large",
                 command=(*RUN, *LONG, "-o", "r.json"), whole=("r.json",))  # fmt: skip
    yield Attack("the result's disk is full", None, (2,), says="/dev/full", command=(*RUN, "-o", "/dev/full"))


def _surroundings() -> Iterator[Attack]:
    yield Attack("no stdin", None, (0,), "exec <&-")
    yield Attack("no stderr", None, (0,), "exec 2>&-")
    yield Attack("an ASCII locale", None, (0,), "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", good="ok: every decode rank")
    yield Attack("a current folder that is gone", None, (2,), 'mkdir gone; cd gone; rmdir "$PWD"', "current folder: can't be told")
    yield Attack("a umask that takes all", None, (0,), "umask 777", needs=ROOT)
    for name, value in {
        "PYTHONOPTIMIZE": "2", "PYTHONDEVMODE": "1", "VLLM_LOGGING_CONFIG_PATH": "/no/such", "VLLM_LOGGING_LEVEL": "LOUD",
        "VLLM_PLUGINS": "nothere", "VLLM_CACHE_ROOT": "/proc/nope", "VLLM_HOST_IP": "10.9.8.7", "GLOO_SOCKET_IFNAME": "nosuch0",
        "MASTER_ADDR": "10.9.8.7", "VLLM_MORIIO_CONNECTOR_READ_MODE": "1", "VLLM_MORIIO_QP_PER_TRANSFER": "x",
    }.items():  # fmt: skip
        yield Attack(f"{name}={value}", None, (0,), env=((name, value),))
    yield Attack("PYTHONWARNINGS=error", None, (0, 2), env=(("PYTHONWARNINGS", "error"),))


def _sockets() -> Iterator[Attack]:
    yield Attack("three bytes", rubbish(b"\xc1\xff\xfe"), (0,))
    yield Attack("nothing", rubbish(b""), (0,))
    yield Attack("a megabyte", rubbish(os.urandom(1 << 20)), (0,))
    yield Attack("a web browser", rubbish(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 20), (0,))
    yield Attack("connections that stay", rubbish(b"\xff", 40, close=False), (0,))
    yield Attack("a ZMQ message", rubbish(b"\xc1\xff\xfe", zmq=True), (0,))
    yield Attack("a ZMQ message of nothing", rubbish(b"", zmq=True), (0,))
    yield Attack("an id", rubbish(b"cmpl-___prefill_addr_x", 5, zmq=True), (0,))
    yield Attack("any port as soon as it is there, for ever", to_any_port(b"\x00\xff" * 50))
    yield Attack("any port as soon as it is there", to_any_port(b"", close=True), command=READ_27)
    yield Attack("rubbish for local sockets", to_local_sockets(b"\xff\x00\xff GET / \r\n"))
    for offset, name in ((0, "prefill's handshake"), (32, "prefill's notify"), (64, "decode's handshake"), (92, "decode's notify")):
        yield Attack(f"{name} port taken", steal(offset))


def _files() -> Iterator[Attack]:
    for moment in ("importing", "forked", "running"):
        yield Attack(f"its folder deleted while {moment}", remove(moment), command=READ_27)
    yield Attack("its shared memory deleted", drop_shared_memory)


def _time() -> Iterator[Attack]:
    yield Attack("8 busy loops", use_up(8, 20.0))
    yield Attack("a twentieth of a CPU", throttle(0.05), (3,), says="too busy", needs=V1)
    for index, name in ((1, "P0"), (3, "D scheduler"), (5, "D1")):
        command = (*(READ_27 if index == 5 else WRITE_27 if index == 3 else (*RUN, *LONG)), *LATER)
        yield Attack(f"{name} stopped 9 of 10 times", flap("children", index, 0.16, 0.02, 6.0), command=command)
        yield Attack(f"{name} stopped for a moment, always", flap("children", index, 0.05, 0.01, 8.0), command=command)
        yield Attack(f"{name} frozen for 3 s", freeze("children", index, 3.0), command=command, needs=FREEZER)
        yield Attack(f"{name} idle beside 2 busy loops", weaken("children", index, 2, "idle"), command=command)
        yield Attack(f"{name} nice beside 3 busy loops", weaken("children", index, 3, "nice"), command=command)
    yield Attack("P1 frozen at the start", freeze("children", 2, 20.0, "forked"), needs=FREEZER)
    yield Attack("all frozen for 3 s", freeze("children", -1, 3.0), command=(*READ_33, *LATER), needs=FREEZER)
    yield Attack("all idle beside 2 busy loops", weaken("children", -1, 2, "idle"), command=(*RUN, *LONG, *LATER))


# -- other commands ------------------------------------------------------------------------------------------------


def _others() -> Iterator[Attack]:
    files = ("-o", "m.jsonl", "--junit", "j.xml")
    killed = at_work(6, signal.SIGKILL, "children", 2)
    yield Attack("matrix, a rank killed", killed, command=(*MATRIX, *files), good="4 ok", whole=("m.jsonl", "j.xml"))
    yield Attack("matrix, a server killed", at_work(6, signal.SIGKILL, "server"), (3,), command=(*MATRIX, *files),
                 whole=("m.jsonl", "j.xml"))  # fmt: skip
    yield Attack("matrix, all stopped", at_work(6, signal.SIGSTOP, "children", -1), command=MATRIX, good="4 ok")
    yield Attack("matrix, its disk is full", None, (2,), says="/dev/full", command=(*MATRIX, "-o", "/dev/full"))
    for number in HANGS:
        ended = at_work(4, number, "driver")
        yield Attack(f"matrix, {number.name}", ended, (CODES[number],), command=(*MATRIX, *files), whole=("m.jsonl", "j.xml"))
        yield Attack(f"confirm, {number.name}", ended, (CODES[number],), command=(*CONFIRM, "-o", "evidence"))
        yield Attack(f"explore, {number.name}", ended, (CODES[number],), command=(*EXPLORE, "--out", "found"))
        yield Attack(f"corpus, {number.name}", ended, (CODES[number],), command=CORPUS)
    yield Attack("confirm, a rank killed", killed, command=(*CONFIRM, "-o", "evidence"), good="CONFIRMED")
    yield Attack("confirm, all stopped", at_work(6, signal.SIGSTOP, "children", -1), command=CONFIRM, good="CONFIRMED")
    yield Attack(
        "explore, a rank killed", at_work(4, signal.SIGKILL, "children", 2), command=(*EXPLORE, "--out", "found"), good="6 "
    )
    yield Attack("corpus, a rank killed", killed, command=CORPUS, good="")
    ends: tuple[tuple[str, Act, tuple[int, ...]], ...] = (
        ("strangers at every port", to_any_port(b"\xff" * 64), (0,)),
        ("a rank killed", at_work(4, signal.SIGKILL, "children", 3, 4.0), (0, 2, 3)),
        ("a rank stopped", at_work(4, signal.SIGSTOP, "children", 2, 8.0), (0, 2, 3)),
        ("SIGTERM", at_work(4, signal.SIGTERM, "driver", 0, 4.0), (143,)),
        ("SIGKILL", at_work(4, signal.SIGKILL, "driver", 0, 4.0), (-9,)),
    )
    for name, act, codes in ends:
        yield Attack(f"torchrun, {name}", act, codes, command=(), program=TORCHRUN)
    ends = (
        ("a rank killed", killed, (0, 1)),
        ("all stopped", at_work(6, signal.SIGSTOP, "children", -1), (0, 1)),
        ("SIGINT", at_work(6, signal.SIGINT, "driver"), (2,)),
        ("SIGTERM", at_work(6, signal.SIGTERM, "driver"), (-15,)),
    )
    for name, act, codes in ends:
        yield Attack(f"pytest, {name}", act, codes, _SCENARIO, command=("s.json",), program=_PYTEST, good="1 passed")


ATTACKS = [*_signals(), *_limits(), *_surroundings(), *_sockets(), *_files(), *_time(), *_others()]
QUICK = {"SIGTERM while importing", "SIGHUP while running", "SIGKILL while running", "P scheduler stopped", "64 files",
         "2 GB of addresses", "a ZMQ message", "TMPDIR of 63 characters", "loopback is down", "/dev/shm that is read-only",
         "D1 idle beside 2 busy loops"}  # fmt: skip
assert sys.platform != "linux" or {each.name for each in ATTACKS} >= QUICK
