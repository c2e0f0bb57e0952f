"""The hardware tier: real `mori.io`, NIC or xGMI, and GPU memory.

Every rank of both engines is a process that torchrun started. On one machine `kvcover run --tier hardware` starts torchrun;
over several nodes it is started on each: see `python -m kvcover.real_backend.tiers.torchrun --help`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvcover.real_backend.driver import logs
from kvcover.real_backend.driver.processes import HOST
from kvcover.real_backend.machine.doctor import Place, examine, lacking
from kvcover.real_backend.machine.trees import choose, refuse_other_release
from kvcover.real_backend.tiers.connector import as_trees
from kvcover.real_backend.tiers.declared import DRAWN, INJECTED, fit
from kvcover.real_backend.tiers.translate import refuse_unlike_layers, to_trial
from kvcover.sim.errors import Inconclusive, MachineError, TierError
from kvcover.sim.launch import Launched, environment, python, work_folder
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.tiers import NOT_BEGUN, Capabilities, Pace, Tier

_LIMIT_S = 900.0
_LAST_LINES = 3


def transport() -> Literal["rdma", "xgmi"]:
    """What MoRI moves bytes by: `KVCOVER_TRANSPORT`, rdma unless it says xgmi. Raises TierError for anything else."""
    name = os.environ.get("KVCOVER_TRANSPORT", "rdma")
    if name == "xgmi":
        return "xgmi"
    if name != "rdma":
        raise TierError("KVCOVER_TRANSPORT", f"{name!r} is no transport", "use rdma or xgmi")
    return "rdma"


class HardwareTier(Tier):
    """This machine's GPUs, one torchrun after another. It never uses the loopback instead."""

    name = "hardware"
    # torchrun ends all ranks when one is missing, so none of them may die or come late.
    can = Capabilities(
        faults=INJECTED - {"crash-rank", "restart-rank", "late-rank"}, features=DRAWN, takes_vllm=True, hardware=True
    )

    def fit(self, draft: dict[str, Any]) -> None:
        fit(draft)

    def release_of(self, vllm: str) -> str | None:
        return choose(vllm, NEWEST, None)[0].identity.release

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        _as_run(scenario, vllm)

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> Sequence[Result | TierError]:
        planned = [_as_run(scenario, vllm) for scenario, vllm in zip(scenarios, vllms, strict=True)]  # before any takes minutes
        results: list[Result | TierError] = []
        told: str | None = None  # what the session's own good case and wrong byte came to, before its first run
        for scenario, vllm in zip(planned, vllms, strict=True):
            tested = () if told is None else ("--no-self-test",)
            try:
                if pace.over():
                    results.append(NOT_BEGUN)
                    continue
                result = launch(scenario, vllm or "installed", ("--transport", transport(), *tested))
                told = told or (result.backend or {}).get("self_test")
                results.append(msgspec.structs.replace(result, backend={**(result.backend or {}), "self_test": told}))
            except TierError as error:
                if not keep_errors:
                    raise
                results.append(error)
            pace.done(len(results) - 1, results[-1])
        return results


hardware_tier = HardwareTier()


def _as_run(scenario: Scenario, vllm: str | None) -> Scenario:
    """The scenario as it would run. Raises TierError if it can't be run here, and never takes another vLLM instead."""
    check_hardware(transport())
    as_run = as_installed(scenario, vllm)
    refuse_unlike_layers(to_trial(as_run))
    return as_run


def as_installed(scenario: Scenario, vllm: str | None) -> Scenario:
    """The scenario with the release of the vLLM that `--vllm` gives; without it the installed one must be what it names.

    Raises TierError if the vLLM that would run is another release, or if the engines would need two.
    """
    trees = choose(vllm or "installed", scenario.release, scenario.decode_release)
    if trees[0] != trees[1]:
        raise TierError(
            "--tier hardware", "both engines run one vLLM here", "start each node with its own --vllm, or use one release"
        )
    if vllm is not None:
        return as_trees(scenario, trees)
    for release in (scenario.release, scenario.decode_release or scenario.release):
        refuse_other_release(trees[0], release, "--tier hardware")
    return scenario


def check_hardware(chosen: Literal["rdma", "xgmi"]) -> None:
    """Raise TierError if this machine lacks anything that the hardware tier needs."""
    short = lacking(examine(Place(transport=chosen)), "hardware")
    if short:
        missing = "; ".join(f"{line.name} ({line.text})" for line in short)
        raise TierError("--tier hardware", f"can't run here: {missing}", "see `kvcover doctor --tier hardware`")


def launch(scenario: Scenario, vllm: str, options: tuple[str, ...], limit_s: float = _LIMIT_S) -> Result:
    """Start torchrun on this machine with one process a rank, and read the result that its first rank writes."""
    trial = to_trial(scenario)
    refuse_unlike_layers(trial)
    ranks = trial.ranks
    with work_folder() as work:
        given, written, log = work / "scenario.json", work / "result.json", work / "torchrun.log"
        given.write_bytes(msgspec.json.encode(scenario))
        command = python("-m", "kvcover.real_backend.tiers.one_node", "--nproc-per-node", str(ranks))
        command += ["-m", "kvcover.real_backend.tiers.torchrun", str(given), "-o", str(written), "--vllm", vllm, *options]
        # Nobody else is to reach the ranks; what they and torchrun leave when they are killed goes with the folder.
        own = environment(KVCOVER_HOST_IP=os.environ.get("KVCOVER_HOST_IP", HOST), TMPDIR=str(work))
        with log.open("wb") as out, Launched(command, env=own, folder=work, stdout=out, stderr=out) as torchrun:
            try:
                torchrun.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise TierError("--tier hardware", f"no result after {limit_s:g} s: {_end_of(log)}", "run it again") from None
            finally:
                logs.keep(work)
        if not written.exists():
            raise TierError("--tier hardware", f"the ranks gave no result: {_end_of(log)}", "see `kvcover doctor --tier hardware`")
        return read_result(written)


def read_result(path: Path) -> Result:
    """Read what the first rank wrote: a result. Raises what ended it, Inconclusive if its session's self-test did."""
    data: dict[str, Any] = json.loads(path.read_text())
    if "inconclusive" in data:
        raise Inconclusive(data["inconclusive"])
    if "error" in data:
        raise (MachineError if data.get("machine") else TierError)(*data["error"])
    return msgspec.convert(data, Result)


def _end_of(log: Path) -> str:
    """Return the last lines that say something: torchrun ends every failure with a table of its own."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    telling = (
        [line for line in lines if line.startswith("kvcover: ")]
        or [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        or [line for line in lines if line]
    )
    return " | ".join(telling[-_LAST_LINES:])[:400]
