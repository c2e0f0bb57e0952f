"""How something is added to the user's cache: one at a time, by commands whose last lines say what went wrong."""

from __future__ import annotations

import fcntl
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcover.sim import launch
from kvcover.sim.errors import InputError

_NO_NETWORK = ("name resolution", "Connection", "Network is unreachable", "ProxyError", "timed out", "Max retries")
_RAISED = re.compile(r"\s*[A-Z]\w*(Error|Exception)\b: ")
_KEPT = 200


@contextmanager
def locked(path: Path, place: str) -> Iterator[None]:
    """Hold the lock of what is added. Raises InputError if another kvcover has it."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(place, "another kvcover is adding it now", "wait for it") from None
        yield


def run_logged(
    command: Sequence[str], env: Mapping[str, str], folder: Path, hear: Callable[[str], None] = lambda line: None
) -> tuple[int, list[str]]:
    """Run a command that works in `folder`, which goes with it; its exit code and last lines. `hear` gets each as it comes."""
    lines: list[str] = []
    with launch.Launched(command, env=env, folder=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.process.stdout is not None
        for each in run.process.stdout:
            line = each.decode(errors="replace").rstrip()
            lines = [*lines[-_KEPT:], line]
            hear(line)
        run.process.wait()
    return run.process.returncode, lines


def pip_error(lines: list[str], place: str, what: str, known: str, needs: str) -> InputError:
    """What pip's last lines say went wrong, while it got `what`; `known` says where to see what there is, `needs` what it takes."""
    text = "\n".join(lines)
    if any(sign in text for sign in _NO_NETWORK) and "No matching distribution" not in text.split("ERROR")[0]:
        return InputError(place, "the package index can't be reached", needs)
    if "No matching distribution" in text:
        return InputError(place, f"the package index has no {what}", known)
    if "No space left on device" in text:
        return InputError(place, "the disk is full", "free some, or set KVCOVER_CACHE to a folder with 400 MB of room")
    raised = [line for line in lines if _RAISED.match(line)]  # what pip says after it is less
    errors = raised or [line for line in lines if "rror" in line] or lines
    return InputError(place, f"pip failed: {errors[-1].strip()[:200] if errors else 'it said nothing'}", needs)
