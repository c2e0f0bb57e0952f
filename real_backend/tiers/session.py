"""A session of torchrun: before a scenario is run, one good case, and one with a byte wrong on purpose that must be seen.

Only then does what is seen say anything of the connector: a machine that loses bytes makes the good case bad, a comparison that
sees nothing makes the wrong byte good. Each case has processes of its own, as a connector's threads never end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults import EventFault
from kvcover.real_backend.driver.trial import Limits, Trial
from kvcover.real_backend.inside.gpu_worker import leave_no_handles
from kvcover.real_backend.machine.trees import choose
from kvcover.real_backend.tiers.connector import as_trees
from kvcover.real_backend.tiers.hardware import hardware_tier
from kvcover.real_backend.tiers.translate import refuse_unlike_layers, to_trial
from kvcover.sim.errors import Inconclusive, InputError, MachineError, TierError
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, Side, build, load

_PR_SET_PDEATHSIG = 1
_REAL_LIMITS = Limits(transfer_s=30.0, defer_s=60.0, read_abort_s=60.0)
_TEST_LIMITS = Limits(transfer_s=8.0, defer_s=10.0, read_abort_s=8.0)
_ENDED_WELL = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a session: `name` keeps its messages apart from others', the first rank writes to `output`.

    `wrong_byte`: decode's first rank finds one byte of its cells wrong. `self_test` is what came of the cases before.
    """

    name: str
    scenario: Scenario
    output: Path
    wrong_byte: bool = False
    self_test: str | None = None


def begin(file: str, output: Path, vllm: str | None, test: bool) -> tuple[Scenario, int]:
    """The scenario in a file and the ranks of its prefill engine; one that names no release is of this node's vLLM.

    Raises InputError for what can't be run here.
    """
    if os.environ.get("RANK") == "0":
        with suppress(OSError):
            output.unlink()  # what an earlier session left would be taken for what this one found
    scenario = build(load(file))
    if vllm is not None and (scenario.release, scenario.decode_release) == (NEWEST, None):
        scenario = as_trees(scenario, choose(vllm, scenario.release, None))
    trial = trial_of(scenario, test)
    expect_ranks(trial.ranks)
    return scenario, len(trial.setup.prefill.rank_names())


def give_up(error: InputError | Inconclusive, output: Path | None) -> int:
    """Say why there is no result, here and, on the first rank, in the result's place; the exit code."""
    if output is not None and os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(failure(error)))
    print(f"kvcover: {error}", file=sys.stderr)
    return error.exit_code


def trial_of(scenario: Scenario, test: bool) -> Trial:
    """What is run of a scenario. Raises InputError for what can't be."""
    hardware_tier.refuse_undeclared(scenario)
    trial = to_trial(scenario)
    refuse_unlike_layers(trial)
    own = _TEST_LIMITS if test else _REAL_LIMITS
    limits = own.unless(scenario.timers)
    trial = replace(trial, limits=replace(limits, read_abort_s=max(limits.read_abort_s, own.read_abort_s)))
    _refuse_to_stall_the_leader(trial)
    return trial


def expect_ranks(ranks: int) -> None:
    """Raise TierError unless torchrun started this process, among so many."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise TierError(
            "kvcover.real_backend.tiers.torchrun",
            "was not started by torchrun",
            "torchrun --nproc-per-node N -m kvcover.real_backend.tiers.torchrun …",
        )
    if (size := int(os.environ["WORLD_SIZE"])) != ranks:
        raise TierError("torchrun", f"{size} processes for {ranks} ranks", f"start {ranks} in all")


def _refuse_to_stall_the_leader(trial: Trial) -> None:
    """Raise TierError for a fault that would hold up the first rank, which leads the run."""
    leader = trial.setup.prefill.rank_name(0, 0)
    for index, fault in enumerate(trial.setup.faults):
        if isinstance(fault, EventFault) and fault.kind == "stall-rank" and fault.target == leader:
            raise TierError(f"faults[{index}]", f"{leader} leads the run here", "stall another rank, or use --tier connector")


def run_session(scenario: Scenario, prefill_ranks: int, output: Path, body: Callable[[Case], int]) -> int:
    """Play a session in this process of torchrun's and return its exit code. `body` is a rank of a case.

    The cases before are played by the first rank of each engine; the others wait for what comes of them.
    """
    rank, good = int(os.environ["RANK"]), easy(scenario)
    mine = {0: 0, prefill_ranks: 1}.get(rank)
    told: str | None = None
    with tempfile.TemporaryDirectory(prefix="kvcover-") as work:
        for case in (Case("good", good, Path(work) / "good"), Case("wrong byte", good, Path(work) / "wrong", wrong_byte=True)):
            if mine is not None and (code := _fork(case, body, {"RANK": str(mine), "WORLD_SIZE": "2"})) != _ENDED_WELL:
                if rank == 0 and case.output.exists():
                    output.write_bytes(case.output.read_bytes())
                return code
        if rank == 0:
            told = verdict(Path(work) / "good", Path(work) / "wrong")
    return _fork(Case("run", scenario, output, self_test=told), body, {})


def easy(scenario: Scenario) -> Scenario:
    """What every release does right, between any two of them: one rank writes to one."""
    return Scenario(
        release=scenario.release,
        decode_release=scenario.decode_release,
        model="layers=2,mla=64+16",
        prefill=Side(tp=1),
        decode=Side(tp=1),
        timers=scenario.timers,
    )


def verdict(good: Path, wrong: Path) -> str:
    """What the cases before say: `passed: …`, or what they say against the machine, the release or the comparison."""
    results = []
    for name, path in (("good case", good), ("case with a wrong byte", wrong)):
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"error": ["it gave no result"]}
        if "error" in data:
            return f"the {name} failed: {': '.join(part for part in data['error'] if part)}"
        results.append(msgspec.convert(data, Result))
    first, second = results
    if (first.outcome, first.coverage) != ("ok", 1.0):
        return f"the good case, P TP1 → D TP1, is {first.outcome} with coverage {first.coverage:.4g}"
    if second.outcome != "corrupt" or not 0 < second.wrong < 1 or abs(second.coverage + second.wrong - 1) > 1e-9:
        seen = f"{second.outcome}, {second.wrong:.4g} of the cells wrong"
        return f"one byte was made wrong, and that was not seen: {seen}"
    return f"passed: a good case is ok, one wrong byte is seen ({second.wrong:.4g} of the cells wrong)"


def require(told: str) -> None:
    """Raise Inconclusive unless the cases before passed."""
    if not told.startswith("passed"):
        raise Inconclusive(f"the session's self-test did not pass: {told}")


def failure(error: Exception) -> dict[str, Any]:
    """What stands in a result's place: why there is none."""
    if isinstance(error, InputError):
        return {"error": [error.place, error.problem, error.hint], "machine": isinstance(error, MachineError)}
    if isinstance(error, Inconclusive):
        return {"error": ["session", str(error), ""], "inconclusive": str(error)}
    return {"error": ["--tier hardware", f"the run failed: {type(error).__name__}: {error}", "report it"]}


def _fork(case: Case, body: Callable[[Case], int], environment: dict[str, str]) -> int:
    """Play a case in a process of its own, which dies with this one; its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()  # nothing but pure Python is loaded here, and no thread runs
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                os.environ.update(environment)
                code = body(case)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    leave_no_handles(pid)
    return code
