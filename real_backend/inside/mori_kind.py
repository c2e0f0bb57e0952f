"""Which `mori.io` a rank's process has, beside the stand-in: the real library over a NIC in software of ours.

What that NIC doesn't show is told with every result.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from pathlib import Path
from typing import Any

from kvcover.sim.results.result import real_mori

SOURCES = Path(__file__).parents[1] / "moriio" / "library"
NOT_SHOWN = ("visibility of a GPU's writes", "order of writes on a NIC", "timing", "registration of memory")
"""What a run over it does not prove."""


def describe_library(folder: Path) -> dict[str, Any]:
    """What is told of the library: its version, the wheel it is of, and that what this process mapped is what was built.

    Raises RuntimeError if a library that this process has loaded is not the one in `folder`, as where another is on its path.
    """
    built = json.loads((folder / "built.json").read_text())
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for name in ("libmori_io.so", "libmori_application.so", "libkvcover_absent.so"):
        found = sorted(path for path in mapped if Path(path).name == name)
        if found != [str(folder.resolve() / "mori" / name)]:
            raise RuntimeError(f"{name} is {found or 'not loaded'}, and not that of {folder}")
    others = sorted(path for path in mapped if "amdhip64" in Path(path).name)
    if others:
        raise RuntimeError(f"{others[0]} is loaded beside mori: take it off LD_LIBRARY_PATH")
    version = built["version"]
    return {"mori": real_mori(version), "mori_version": version, "mori_wheel": built["wheel"], "mori_libraries": built["libraries"]}


def slow_down(mori_io: Any, seconds: float) -> None:
    """Let every transfer of this process take so long from its post; the stand-in and the NIC both can."""
    mori_io.completion_delay_s = seconds
    if nic := _nic():
        nic.kvcover_nic_delay.argtypes = [ctypes.c_double]
        nic.kvcover_nic_delay(seconds)


def landed_ns(status: Any, address: int, posted_ns: int) -> int:
    """When a batch that was posted then, with this address here in it, was complete, on the monotonic clock; 0 if nothing says.

    The stand-in keeps it with the status, and for the library the NIC does.
    """
    own: int | None = getattr(status, "done_ns", None)
    if own is not None or (nic := _nic()) is None:
        return own or 0
    nic.kvcover_nic_landed.argtypes, nic.kvcover_nic_landed.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_uint64
    return int(nic.kvcover_nic_landed(address, posted_ns))


def _nic() -> Any:
    """The NIC in software of this process, None if it has none."""
    path = Path(str(importlib.import_module("mori.io").__file__)).parents[1] / "libibverbs.so.1"
    return ctypes.CDLL(str(path)) if (path.parent / "libkvcover_absent.so").exists() else None
