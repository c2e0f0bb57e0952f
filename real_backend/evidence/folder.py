"""The folder that a run or a confirmation leaves, also when it fails: what ran, on what, what came of it, and a summary.

Each file is written whole or not at all, and the summary says that nothing was concluded until something is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvcover.real_backend.driver import logs
from kvcover.real_backend.evidence.confirm import trees_of
from kvcover.real_backend.evidence.summary import summary
from kvcover.real_backend.machine.checkout import checkout
from kvcover.real_backend.machine.doctor import Place, examine, lacking
from kvcover.real_backend.machine.environment import environment
from kvcover.real_backend.machine.trees import Tree
from kvcover.real_backend.tiers.hardware import transport
from kvcover.sim.commands.options import write_output
from kvcover.sim.errors import InputError
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.tiers import load_tier

# Variables that change a run and hold no secret, no name and no path.
_VARIABLES = (
    "KVCOVER_DEVICE", "KVCOVER_MORI", "KVCOVER_TRANSPORT", "OMP_NUM_THREADS", "PYTHONHASHSEED", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "HSA_ENABLE_SDMA", "MORI_IO_QP_TIMEOUT",
    "MORI_IO_QP_RETRY_CNT", "MORI_IO_SQ_BACKOFF_TIMEOUT_US",
    "MORI_READ_ABORT_REQUEST_TIMEOUT", "VLLM_LOGGING_LEVEL", "VLLM_MORIIO_CONNECTOR_READ_MODE", "VLLM_MORIIO_DEFERRED_TIMEOUT_S",
    "VLLM_MORIIO_NUM_WORKERS", "VLLM_MORIIO_POST_BATCH_SIZE", "VLLM_MORIIO_QP_PER_TRANSFER", "VLLM_MORIIO_TRANSFER_TIMEOUT_S",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)  # fmt: skip
UNFINISHED = "INCONCLUSIVE: it did not end"


class Folder:
    """The files of one session. `verdict` and `results` are what its summary tells when it ends."""

    def __init__(self, path: Path, command: str) -> None:
        self._path, self._command = path, command
        self.verdict = UNFINISHED
        self.results: dict[str, Result] = {}

    def write(self, name: str, data: str | Mapping[str, Any]) -> None:
        """Write one file, whole or not at all."""
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        write_output(str(self._path / name), text, str(self._path))

    def add(self, name: str, result: Result) -> None:
        """Keep a result as NAME.json, as `kvcover run -o` writes it."""
        self.results[name] = result
        self.write(f"{name}.json", result.to_json() + "\n")

    def sum_up(self) -> None:
        """Write the summary of what is known by now."""
        self.write("summary.md", summary(self.verdict, self._command, self.results, environment()))


@contextmanager
def keeping(path: str, command: str, tier: str, runs: Sequence[tuple[Scenario, str | None]]) -> Iterator[Folder]:
    """Keep everything of a session in a new folder. `runs` are scenarios and what `--vllm` says for each.

    Raises InputError if there is such a folder already and it is not empty: evidence of two sessions is none.
    """
    around, doctor = surroundings(runs, tier), _doctor(tier) if runs else ""
    folder = Folder(_new(path), command)
    folder.write("environment.json", around)
    if runs:
        folder.write("doctor.txt", doctor)
        folder.write("scenario.json", msgspec.to_builtins(runs[0][0]))
    folder.sum_up()
    (Path(path) / "logs").mkdir()
    try:
        with logs.kept_in(Path(path) / "logs"):
            yield folder
    except BaseException as error:
        if folder.verdict == UNFINISHED:
            folder.verdict = f"INCONCLUSIVE: {type(error).__name__}: {error}"
        raise
    finally:
        folder.sum_up()


def _new(path: str) -> Path:
    hint = "name a new folder"
    folder = Path(path)
    try:
        folder.mkdir(parents=False, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(path, "is a folder with files in it", hint)
        if not os.access(folder, os.W_OK):
            raise InputError(path, "can't be written to", hint)
    except (OSError, ValueError) as error:
        raise InputError(path or "''", f"can't be made a folder: {getattr(error, 'strerror', None) or error}", hint) from None
    return folder


def surroundings(runs: Sequence[tuple[Scenario, str | None]], tier: str) -> dict[str, Any]:
    """Versions and devices of this machine, variables that matter, and which vLLMs run. No secrets, no paths."""
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    chosen = load_tier(tier)
    trees = [tree for run in runs for tree in trees_of(chosen, *run)] if chosen.can.takes_vllm else []
    return environment() | {"variables": variables, "vllm": [_about(tree) for tree in dict.fromkeys(trees)]}


def _about(tree: Tree) -> dict[str, Any]:
    return {
        "calls_itself": tree.version,
        "is": tree.identity.text,
        "kind": tree.kind,
        "connector_files": dict(tree.files),
        "git": checkout(tree.path) if tree.path else None,
    }


def _doctor(tier: str) -> str:
    lines = examine(Place(transport=transport()))
    short = ", ".join(line.name for line in lacking(lines, tier))
    end = f"the {tier} tier " + (f"needs {short}" if short else "can run here")
    return "\n".join([*(line.line(tier) for line in lines), end]) + "\n"
