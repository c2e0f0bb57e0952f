"""One rank of a run over one or several nodes. Started by torchrun on each of them, with the same scenario file.

    torchrun --nnodes 2 --node-rank N --nproc-per-node 8 --master-addr HOST --master-port 29500 \\
        -m kvcover.real_backend.tiers.torchrun scenario.toml --vllm installed --transport rdma -o result.json

Before the scenario a good case is run, and one with a wrong byte that must be seen; else the result says that nothing is shown.
The first ranks are prefill's, in (dp, tp) order, then come decode's; all ranks of an engine must be on one node. Several
ranks may share a GPU. The first rank of all also plays the router and writes the result.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import msgspec

from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.driver.children import Children
from kvcover.real_backend.driver.harness import drive
from kvcover.real_backend.driver.processes import Ports, reserve_ports
from kvcover.real_backend.driver.rank_faults import ProcessFaults
from kvcover.real_backend.driver.reports import RunSeen
from kvcover.real_backend.driver.spool import Spool
from kvcover.real_backend.driver.trial import ROLES, Role, Trial
from kvcover.real_backend.driver.wire import Wire
from kvcover.real_backend.inside import scheduler
from kvcover.real_backend.inside.device_worker import DeviceWorker, prepare_device, suit
from kvcover.real_backend.inside.gpu_worker import leave_no_handles
from kvcover.real_backend.inside.raising import raised_by
from kvcover.real_backend.inside.vllm_setup import ConfigFactory, describe, prepare
from kvcover.real_backend.machine.trees import Tree, choose, refuse_other_release, release_of
from kvcover.real_backend.tiers.meeting import Link, Meeting, Steps, join, newcomers, own_host
from kvcover.real_backend.tiers.report import ON_GPU, to_result
from kvcover.real_backend.tiers.session import Case, begin, failure, give_up, require, run_session, trial_of
from kvcover.sim.errors import Inconclusive, InputError, TierError

_START_LIMIT_S = 300.0
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Position:
    """Which rank of which engine a process is."""

    role: Role
    dp: int
    tp: int


def positions(trial: Trial) -> list[Position]:
    """Return who is who, by torchrun's rank."""
    return [
        Position(role, dp, tp) for role in ROLES for dp in range(trial.endpoint(role).dp) for tp in range(trial.endpoint(role).tp)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Body of every process; errors are one line, on the first rank."""
    parser = argparse.ArgumentParser(
        prog="kvcover.real_backend.tiers.torchrun", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("scenario", help="TOML or JSON file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file for the result, written by the first rank")
    parser.add_argument("--vllm", help="release, path or installed; of this node (default: the installed one, if it is named)")
    parser.add_argument("--transport", choices=("rdma", "xgmi"), default="rdma", help="what MoRI moves bytes by")
    parser.add_argument("--no-self-test", action="store_true", help="the session's machine was tested just now; not for evidence")
    parser.add_argument("--loopback-test", action="store_true", help="over the stand-in: proves nothing of MoRI or a NIC")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose memory the stand-in uses")
    options = parser.parse_args(arguments)
    try:
        scenario, prefill_ranks = begin(options.scenario, options.output, options.vllm, options.loopback_test)
    except InputError as error:
        return give_up(error, options.output)
    if options.no_self_test:
        return _play(options, Case("run", scenario, options.output))
    return run_session(scenario, prefill_ranks, options.output, lambda case: _play(options, case))


def _play(options: argparse.Namespace, case: Case) -> int:
    """Be a rank of a case."""
    meeting = join(case.name)
    try:
        _be_rank(options, case, meeting)
    except (InputError, Inconclusive) as error:
        return give_up(error, case.output if meeting.rank == 0 else None)
    return 0


def _be_rank(options: argparse.Namespace, case: Case, meeting: Meeting) -> None:
    scenario, test = case.scenario, options.loopback_test
    trial = trial_of(scenario, test)
    mine = positions(trial)[meeting.rank]
    if case.name == "run" and not options.no_self_test:
        if meeting.rank == 0:
            meeting.tell("self-test", case.self_test)
        require(meeting.hear("self-test"))
    host = own_host(test)
    device = _device(meeting.local_rank) if not test or options.device == "cuda" else "cpu"
    tree = _tree(options.vllm, (mine.role == "decode" and scenario.decode_release) or scenario.release)
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvcover-") as folder:
        work = Path(folder)
        ports = _agree_on_ports(meeting, trial, mine, host, stack)
        if test:
            prepare(tree.path, trial.limits.read_abort_s, options.device)
        else:
            prepare_device(tree.path, trial.limits.read_abort_s, host)
        config = ConfigFactory(work / "models").engine(trial, mine.role, mine.dp, ports[mine.role])
        suit(config, host, options.transport, device.partition(":")[0])
        about = describe(tree.path) | {
            "mori": "loopback" if test else _mori(options.transport),
            "device": _name(device),
            "host": host,
        }
        meeting.tell(f"about/{meeting.rank}", about)
        for_ranks = _share_book(meeting, trial, work / "book")
        leader = None
        if meeting.rank == 0:
            listener = Listener((host, 0), backlog=_BACKLOG)
            arriving = newcomers(listener, _new_key(meeting))
            meeting.tell("listener", [host, listener.address[1]])
            leader = threading.Thread(
                target=_lead, args=(options, case, meeting, trial, ports, work, arriving), daemon=True, name="leader"
            )
            leader.start()
        spool = _share_spool(meeting, mine, work)
        _serve(meeting, for_ranks, config, mine, ports, device, spool, case.wrong_byte)
        if leader is not None:
            leader.join()


def _tree(vllm: str | None, release: str) -> Tree:
    """The vLLM of this node. Raises TierError if the scenario names another for the engine that is here."""
    tree = choose(vllm or "installed", release, release)[0]
    if vllm is None:
        refuse_other_release(tree, release, "torchrun")
    else:
        release_of(tree, release)
    return tree


def _share_book(meeting: Meeting, trial: Trial, book: Path) -> Trial:
    """What the ranks get: no faults if only the router has some, else the file in which all processes count them."""
    if not trial.events:
        return trial
    hosts = {meeting.hear(f"host/{rank}") for rank in range(meeting.size)}
    if len(hosts) > 1:
        text = "faults of notices, transfers and ranks need all ranks on one node, where they can count them together"
        raise TierError("faults", text, "use one node, or faults of the router's keys")
    if meeting.rank == 0:
        SharedInjector(trial.setup.faults, book).close()  # there before anyone counts
        meeting.tell("book", str(book))
    return replace(trial, book=Path(meeting.hear("book")))


def _share_spool(meeting: Meeting, mine: Position, work: Path) -> Spool:
    """The folder that the first rank of an engine shares with the others, which are on its node."""
    key = f"spool/{mine.role}{mine.dp}"
    if mine.tp == 0:
        (work / "spool").mkdir(mode=0o700)
        meeting.tell(key, str(work / "spool"))
    return Spool(Path(meeting.hear(key)))


def _agree_on_ports(meeting: Meeting, trial: Trial, mine: Position, host: str, stack: ExitStack) -> dict[Role, Ports]:
    """Let the first rank of each engine take ports on its host, and check that its other ranks are there too."""
    meeting.tell(f"host/{meeting.rank}", host)
    if mine.dp == mine.tp == 0:
        found = stack.enter_context(reserve_ports())[ROLES.index(mine.role)]
        meeting.tell(f"ports/{mine.role}", [found.handshake, found.notify, found.http, host])
    ports: dict[Role, Ports] = {role: Ports(*meeting.hear(f"ports/{role}")) for role in ROLES}
    for rank, position in enumerate(positions(trial)):
        there, wanted = meeting.hear(f"host/{rank}"), ports[position.role]
        if there != wanted.host:
            text = f"ranks of the {position.role} engine are on {wanted.host} and on {there}"
            raise TierError("torchrun", text, "start all ranks of an engine on one node: a multiple of them each")
    return ports


def _device(local_rank: int) -> str:
    torch: Any = importlib.import_module("torch")
    count = int(torch.cuda.device_count())
    if not count:
        raise TierError("torch", "sees no GPU", "see `kvcover doctor --tier hardware`")
    return f"cuda:{local_rank % count}"


def _name(device: str) -> str:
    return "cpu" if device == "cpu" else f"{device} {importlib.import_module('torch').cuda.get_device_name(device)}"


def _mori(transport: str) -> str:
    metadata = importlib.import_module("importlib.metadata")
    try:
        version = metadata.version("amd-mori")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return f"amd-mori {version} over {transport}"


def _new_key(meeting: Meeting) -> bytes:
    meeting.tell("key", (key := os.urandom(16)).hex())
    return key


def _serve(
    meeting: Meeting,
    trial: Trial,
    config: Any,
    mine: Position,
    ports: dict[Role, Ports],
    device: str,
    spool: Spool,
    wrong_byte: bool,
) -> None:
    """Be a rank, and its engine's scheduler if it is the first of it, until the leader lets go."""
    host, port = meeting.hear("listener")
    key = bytes.fromhex(meeting.hear("key"))

    def connect(part: str) -> Connection:
        pipe = Client((host, port), authkey=key)
        Wire(pipe).send((meeting.rank, os.getpid(), part))
        return pipe

    steps, questions = Wire(connect("steps")), Wire(connect("questions"))
    scheduler = Steps(connect("scheduler"), spool) if mine.tp == 0 else None
    try:
        worker = DeviceWorker(trial, config, mine.tp, ports, meeting.store, device, wrong_byte and mine.role == "decode")
    except Exception as error:
        traceback.print_exc()
        raised = raised_by(trial.endpoint(mine.role).rank_name(mine.dp, mine.tp), error)
        for pipe in (steps, scheduler):
            if pipe is not None:
                pipe.send(raised)
        with suppress(EOFError, OSError):
            steps.recv()  # until the leader is done
        return
    if scheduler is not None:
        threading.Thread(target=_schedule, args=(trial, config, ports, scheduler), daemon=True).start()
    threading.Thread(target=_answer, args=(worker, questions, spool), daemon=True).start()
    steps.send(None)
    _answer(worker, steps, spool)


def _schedule(trial: Trial, config: Any, ports: dict[Role, Ports], pipe: Wire) -> None:
    with suppress(EOFError, OSError):
        scheduler.serve(trial, config, ports, pipe)


def _answer(worker: DeviceWorker, pipe: Wire, spool: Spool) -> None:
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):  # the leader is done
            return
        if method == "step":
            arguments = (spool.take(arguments[0]), *arguments[1:])
        pipe.send(getattr(worker, method)(*arguments))


def _lead(
    options: argparse.Namespace,
    case: Case,
    meeting: Meeting,
    trial: Trial,
    ports: dict[Role, Ports],
    work: Path,
    arriving: Iterator[tuple[Wire, Any]],
) -> None:
    """Play the router and the engines' loops, judge, and write the result whole or not at all."""
    children = Children(ports, {}, {})
    try:
        _collect(trial, children, arriving)
        started, book = time.monotonic(), SharedInjector(trial.setup.faults, work / "book")
        seen = drive(trial, children, ProcessFaults(trial, book), book, _START_LIMIT_S, started)
        abouts = [meeting.hear(f"about/{rank}") for rank in range(meeting.size)]
        text = _result(options, case, trial, seen, abouts)
    except Exception as error:
        text = json.dumps(failure(error))
    partial = case.output.with_name(f".{case.output.name}.partial")
    partial.write_text(text)
    partial.replace(case.output)
    for child in children.all():
        child.close()


def _collect(trial: Trial, children: Children, arriving: Iterator[tuple[Wire, Any]]) -> None:
    """Take in every connection: two of each rank, and one more of each scheduler."""
    who = positions(trial)
    on_one_node = bool(trial.events)  # else they are refused; see _share_book
    links: dict[int, Link] = {}
    for rank, position in enumerate(who):
        endpoint = trial.endpoint(position.role)
        links[rank] = Link(endpoint.rank_name(position.dp, position.tp))
        children.ranks.setdefault((position.role, position.dp), []).append(links[rank])
    for role in ROLES:
        for dp in range(trial.endpoint(role).dp):
            children.schedulers[role, dp] = Link(f"{role} scheduler {dp}")
    for pipe, (rank, pid, part) in itertools.islice(arriving, 2 * len(who) + len(children.schedulers)):
        if part == "scheduler":
            position = who[rank]
            scheduler = children.schedulers[position.role, position.dp]
            scheduler.steps = scheduler.questions = pipe
        else:
            setattr(links[rank], part, pipe)
            if on_one_node:
                links[rank].pid = pid


def _result(options: argparse.Namespace, case: Case, trial: Trial, seen: RunSeen, abouts: list[dict[str, Any]]) -> str:
    infos = (abouts[0], abouts[-1])
    release = trial.setup.scenario.release
    leader = choose(options.vllm or "installed", release, release)[0]
    decode = replace(leader, version=str(infos[1]["vllm"]), files=())  # perhaps of another node
    result = to_result(trial, seen, (leader, decode), infos, options.vllm)
    hosts = {about["host"]: sorted({each["device"] for each in abouts if each["host"] == about["host"]}) for about in abouts}
    own = {"mori": abouts[0]["mori"], "launcher": "torchrun", "hosts": hosts, "self_test": case.self_test}
    backend = {**(result.backend or {}), **own}
    tier, replay = "connector", result.replay
    if not options.loopback_test:
        tier, replay = "hardware", result.replay.removeprefix(ON_GPU).replace("--tier connector", "--tier hardware")
    return msgspec.structs.replace(result, tier=tier, replay=replay, backend=backend).to_json()


if __name__ == "__main__":
    code = main()
    leave_no_handles(os.getpid())
    sys.stdout.flush()
    os._exit(code)  # the connector's threads never end
