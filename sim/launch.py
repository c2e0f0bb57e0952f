"""The one launcher: how every process that is not this one is started, and how it surely ends.

A guard (`guard.py`) stands between: it runs the command in a process group of its own, and ends it with all that came of it
when it is asked to, when the command is over, or when this process dies, however that dies. No code comes from the
current folder. Pools of processes are made in `search/workers.py`, as their guard is the pool itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvcover.sim.errors import TierError

_GUARD = Path(__file__).with_name("guard.py")
_END_LIMIT_S = 8.0
_LONGEST_FOLDER = 40
"""A socket's path may have 107 bytes, and vLLM's sockets have names of 36."""
_LEAST_FREE = 16 << 20
_UNWINDING_S = 10.0
_SAFE = {"PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
"""No module from the current folder; and vLLM's sources read files of theirs by the locale's encoding, which may be ASCII."""


def python(*arguments: str) -> list[str]:
    """A command of this interpreter that takes no module from the current folder."""
    return [sys.executable, "-P", *arguments]


def environment(**more: str) -> dict[str, str]:
    """This process's, for one that takes no module from the current folder, nor do those that it starts.

    In PYTHONPATH an empty part means the current folder, mostly by mistake; a relative one is from here, wherever the process is.
    """
    own = {**os.environ, **_SAFE, **more}
    if parts := [os.path.abspath(part) for part in own.pop("PYTHONPATH", "").split(os.pathsep) if part]:
        own["PYTHONPATH"] = os.pathsep.join(parts)
    return own


class Launched:
    """A command that runs under a guard. `process` is the guard, which ends as the command does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        folder: Path | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        """Start it. `folder` is one that this process will delete: the guard does if this process dies before.

        Raises TierError if there can be no more processes, files or memory.
        """
        try:
            life, end = os.pipe()
        except OSError as error:
            raise _no_process(error) from None
        guarded = [sys.executable, "-I", "-S", str(_GUARD), str(life), str(folder or ""), *command]
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                guarded,
                env=environment() if env is None else env,
                cwd=cwd,
                pass_fds=(life, *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        except OSError as error:
            os.close(end)
            raise _no_process(error) from None
        finally:
            os.close(life)
        self._stop = weakref.finalize(self, _stop, self.process, end)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the command and all that came of it, now."""
        self._stop()

    def output(self, limit_s: float | None = None) -> tuple[str, str]:
        """Wait for the end; what it wrote to pipes. Raises subprocess.TimeoutExpired, after which `stop` is still to come."""
        out, err = self.process.communicate(timeout=limit_s)
        return tuple((part or b"").decode(errors="replace") for part in (out, err))  # type: ignore[return-value]


def _no_process(error: OSError) -> TierError:
    return TierError("processes", f"none can be started: {error.strerror or error}", "free memory, processes or files")


def _stop(process: subprocess.Popen[bytes], end: int) -> None:
    with contextlib.suppress(OSError):
        os.write(end, b".")
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:  # somebody has stopped the guard
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        os.close(end)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


# -- folders -----------------------------------------------------------------------------------------------------


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for a run, deleted at its end, with a path so short that sockets fit in, whatever TMPDIR says.

    Raises TierError if there is no place for one, or no space in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvcover-", dir=_short_place()))
    try:
        yield folder
    finally:
        for _ in range(5):  # somebody may still write a last word
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _short_place() -> str:
    reasons = []
    try:
        own = tempfile.gettempdir()
    except OSError:
        own = os.environ.get("TMPDIR", "/tmp")
    for place in dict.fromkeys((own, "/tmp", "/var/tmp", "/dev/shm")):
        if len(os.fsencode(os.path.join(place, "kvcover-12345678"))) > _LONGEST_FOLDER:
            reasons.append(f"{place} is too long a path for sockets")
        elif not os.access(place, os.W_OK | os.X_OK):
            reasons.append(f"{place} can't be written to")
        elif (free := _free_bytes(place)) < _LEAST_FREE:
            reasons.append(f"{place} has {free >> 20} MiB free, not {_LEAST_FREE >> 20}")
        else:
            return place
    raise TierError("TMPDIR", f"no place for a run's files: {'; '.join(reasons)}", "free some space, or set TMPDIR to a short path")


def _free_bytes(place: str) -> int:
    try:
        found = os.statvfs(place)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
