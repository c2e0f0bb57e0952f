"""What is installed may not work: only an import tells. It takes seconds, in a process of its own."""

from __future__ import annotations

import subprocess

from kvcover.sim import launch

NAMES = ("torch", "zmq", "msgpack", "transformers", "pydantic", "numpy")
"""What both real tiers import before anything else."""
_LIMIT_S = 120.0
_TRY = """
import importlib, os, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
device = os.environ.get("KVCOVER_DEVICE", "cpu")
if device not in ("cpu", "cuda"):
    print(f"KVCOVER_DEVICE: {device!r} is no kind of device; use cpu or cuda")
elif device == "cuda" and "torch" in sys.modules and not sys.modules["torch"].cuda.is_available():
    print("KVCOVER_DEVICE: torch sees no GPU; leave it out to use the memory of this machine")
print("tried")
"""


def broken(names: tuple[str, ...] = NAMES) -> list[str]:
    """One line for each library that can't be imported, and for a KVCOVER_DEVICE that isn't here; empty if all is well."""
    with launch.Launched(launch.python("-c", _TRY, *names), stdout=subprocess.PIPE) as tried:
        try:
            lines = tried.output(_LIMIT_S)[0].splitlines()
        except subprocess.TimeoutExpired:
            return [f"not done after {_LIMIT_S:g} s"]
    if lines[-1:] != ["tried"]:
        return [*lines, f"ended with exit code {tried.process.returncode}"]
    return lines[:-1]
