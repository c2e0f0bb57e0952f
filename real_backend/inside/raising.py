"""Which call on the connector let an exception out, whether the harness failed, and whether the code or the machine is broken."""

from __future__ import annotations

import errno
import os
import re
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from kvcover.real_backend.driver.reports import Escaped

CONNECTOR = "/kv_connector/v1/moriio/"
"""In the path of every file of the connector, and of nothing else: the stand-in for `mori.io` lies in a `moriio` too."""


def raised_by(name: str, error: BaseException) -> Escaped:
    """Say which call on the connector let an exception out: the outermost frame in the connector's module.

    When the clean-up after one call raised again, the first exception is the one to tell.
    """
    first = error
    while first.__context__ is not None and _connector_call(first.__context__) not in ("", _connector_call(first)):
        first = first.__context__
    call = _connector_call(first)
    misfit = where_it_failed(first) if not call and isinstance(first, _MISFITS) else ""
    foreign = not (call or misfit) and isinstance(first, _FOREIGN) and not _is_of_vllm(first)
    return replace(escaped(name, call or _vllm_call(first) or "outside the connector", first), misfit=misfit, foreign=foreign)


def escaped(name: str, call: str, error: BaseException) -> Escaped:
    """An exception as it is reported: with its whole traceback, the innermost line of the connector in it, and what was broken."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if CONNECTOR in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    whole, lacks = "".join(traceback.format_exception(error)), what_machine_lacks(error)
    return Escaped(name, call, type(error).__name__, str(error), "", what_is_broken(error), place, whole, lacks)


def _vllm_call(error: BaseException) -> str:
    """The innermost function of vLLM's that let an exception out, empty if it came from elsewhere."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f"{each.name}, {Path(each.filename).name}:{each.lineno}" for each in last if _is_of_vllm(error))


_FOREIGN = (OSError, MemoryError, RuntimeError, SystemError, EOFError)
"""What sockets, files, threads and torch raise."""


def _is_of_vllm(error: BaseException) -> bool:
    """Whether vLLM itself raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("vllm.")


_MISFITS = (AttributeError, TypeError, ImportError, NameError)
"""What a harness meets that calls things which aren't there any more."""


_MACHINE = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EIO, errno.EROFS,
    errno.ENOENT, errno.ENODEV, errno.ENXIO,
)  # fmt: skip
"""Of files, memory and devices. Not those of addresses and peers: there the connector, or a fault, may have said where to go."""


def what_is_broken(error: BaseException) -> str:
    """Say which error, this one or a cause of it, is of a kind that no protocol makes; empty if there is none.

    A name that is nowhere, a module or a part of one that is missing, no memory, a file or device of the machine, a region
    that MoRI won't register, an exit, as no release of the connector exits. A KeyError, an AssertionError, a variable that
    this path never set are the connector's own.
    """
    each: BaseException | None = error
    while each is not None:
        missing = isinstance(each, NameError) and not isinstance(each, UnboundLocalError)
        missing |= isinstance(each, AttributeError) and isinstance(each.obj, ModuleType)
        number = getattr(each, "errno", None)
        machine = number in _MACHINE or (isinstance(each, OSError) and number is None and type(each) is OSError)  # dlopen's
        machine |= isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError"  # torch's is a RuntimeError
        if missing or machine or isinstance(each, (ImportError, SyntaxError, SystemExit)) or _registration_refused(each):
            return f"{type(each).__name__}: {each}"
        each = each.__cause__
    return ""


_LACKS = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOBUFS,
)  # fmt: skip
_BUSY_PORT = re.compile(r":(\d+)\D*$")


def what_machine_lacks(error: BaseException) -> str:
    """Say which error, this one or a cause of it, is the machine's, whoever met it: no more files, memory, threads or disk, or a
    port that another program holds; empty if none is.
    """
    each: BaseException | None = error
    while each is not None:
        number = getattr(each, "errno", None)
        lacks = number in _LACKS or isinstance(each, MemoryError) or "can't start new thread" in str(each)
        if lacks or (number == errno.EADDRINUSE and _is_strangers(str(each))):
            return f"{type(each).__name__}: {each}"
        each = each.__cause__ or each.__context__
    return ""


def _is_strangers(text: str) -> bool:
    """Whether a port that is in use is held by no process of this one's session, in which all ranks of an engine are.

    Under torchrun each rank has a session of its own; then it can't be told, and isn't.
    """
    found = _BUSY_PORT.search(text)
    if found is None or os.getsid(0) == os.getpid():
        return False
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and row[1].endswith(f":{int(found[1]):04X}")}
    return not any(_holds(int(entry.name), sockets) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


_LISTENS = "0A"


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        return os.getsid(pid) == os.getsid(0) and any(os.readlink(each) in sockets for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _registration_refused(error: BaseException) -> bool:
    """Whether MoRI wouldn't register a region. That it isn't contiguous is for the connector to see to."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    inside = any(frame.name.startswith("register_") and re.search(r"/mori/io(\.py$|/)", frame.filename) for frame in last)
    return inside and "contiguous" not in str(error)


def where_it_failed(error: BaseException) -> str:
    """Say which line of the harness let an exception out, and the exception."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "real_backend" in frame.filename]
    line = f"`{ours[-1].line}` in {ours[-1].name}" if ours else "a call"
    return f"{line}: {type(error).__name__}: {error}"


def _connector_call(error: BaseException) -> str:
    calls = (frame.name for frame in traceback.extract_tb(error.__traceback__) if "moriio" in frame.filename)
    return next(calls, "")
