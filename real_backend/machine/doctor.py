"""Can a tier run here? Each check looks at one thing, says what it found and, if it is missing, how to get it.

Files, package metadata and sockets say most of it and take no time. Only `Place.imports` has libraries imported, elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvcover.real_backend.machine.imports import NAMES, broken
from kvcover.real_backend.machine.mori import NEWEST as NEWEST_MORI
from kvcover.real_backend.machine.mori import added, missing
from kvcover.real_backend.machine.room import lacks
from kvcover.real_backend.machine.trees import cache, installed, trees
from kvcover.sim.errors import InputError, TierError
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.results.verdict import PASS, Verdict, fail, inconclusive

State = Literal["ok", "missing", "unknown"]
_LOOPBACK = ("connector",)
_HARDWARE = ("hardware",)
_OWN = ("click", "msgspec", "numpy", "rich", "simpy")
_ARCHITECTURES = ("gfx942", "gfx950")
_PEER_LIMIT_S = 1.0
_OLD_MORI, _NEW_MORI = "1.1.0", "1.2.3.post1"
_MORI_OF = dict.fromkeys(("0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31"), _OLD_MORI) | {
    "0.32": _NEW_MORI,
    "0.33": _NEW_MORI,
}
"""MoRI in each vLLM release's own ROCm image (`MORI_BRANCH` in docker/Dockerfile.rocm_base)."""


@dataclass(frozen=True, slots=True)
class Look:
    """One thing that was looked at. `tiers` can't run without it."""

    name: str
    state: State
    text: str
    how: str = ""
    tiers: tuple[str, ...] = ()

    def line(self, tier: str) -> str:
        """What stands of it where one tier is asked for; how to get what that tier does without is no advice."""
        how = self.how if self.state == "ok" or tier in self.tiers else f"the {tier} tier does without"
        return f"{self.state:8} {self.name:16} {self.text}" + (f" → {how}" if self.how else "")


@dataclass(frozen=True, slots=True)
class Place:
    """What is examined: the machine under `root`, a peer `host:port` if there is one, for MoRI over one transport.

    `purpose` is the command that is to run: `confirm` needs two vLLMs. `imports`: try those of a real tier too, some seconds.
    """

    root: Path = Path("/")
    peer: str | None = None
    transport: Literal["rdma", "xgmi"] = "rdma"
    purpose: Literal["run", "confirm"] = "run"
    imports: bool = False

    def read(self, path: str) -> str | None:
        """Return a small file's text without its ends, None if it isn't there."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    @property
    def nic(self) -> tuple[str, ...]:
        """Tiers that need a NIC: between GPUs of one host xGMI needs none."""
        return _HARDWARE if self.transport == "rdma" else ()


def examine(place: Place) -> list[Look]:
    """Look at everything, in the order of the tiers. Never raises: what can't be found out is unknown."""
    lines: list[Look] = []
    for check in CHECKS:
        try:
            lines += check(place)
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            text = f"the check failed: {type(error).__name__}: {error}"
            lines.append(Look(name, "unknown", text, "report this", (*_LOOPBACK, *_HARDWARE)))  # nobody knows who needs it
    return lines


def lacking(lines: list[Look], tier: str) -> list[Look]:
    """Return what keeps a tier from running: all that it needs and that isn't known to be there."""
    return [line for line in lines if tier in line.tiers and line.state != "ok"]


def verdict(lines: list[Look], tier: str) -> Verdict:
    """Return whether a tier can run here; where nothing was looked at, nobody knows."""
    if not any(tier in line.tiers for line in lines):
        return inconclusive(f"nothing was looked at that the {tier} tier needs")
    lacks = lacking(lines, tier)
    return fail(f"the {tier} tier needs {', '.join(line.name for line in lacks)}") if lacks else PASS


def _own_packages(place: Place) -> Iterator[Look]:
    missing = [name for name in _OWN if find_spec(name) is None]
    how = f"pip install {' '.join(missing)}"
    text = f"no {', '.join(missing)}" if missing else ", ".join(_OWN)
    yield Look("packages", "missing" if missing else "ok", text, how if missing else "", ("model", *_LOOPBACK, *_HARDWARE))


def _system(place: Place) -> Iterator[Look]:
    needed = (*_LOOPBACK, *_HARDWARE)
    if sys.platform == "linux":
        yield Look("system", "ok", f"Linux, Python {sys.version.split()[0]}", tiers=needed)
    else:
        yield Look("system", "missing", f"{sys.platform} can only run the model", "use Linux", needed)


def _connector_extra(place: Place) -> Iterator[Look]:
    try:
        wanted = [text for text in metadata.requires("kvcover") or () if re.search(r"extra == ['\"]connector['\"]", text)]
    except metadata.PackageNotFoundError:
        yield Look("connector extra", "unknown", "kvcover is not installed", "pip install -e '.[connector]'", _LOOPBACK)
        return
    names = [match.group() for match in (re.match(r"[\w.-]+", text) for text in wanted) if match]
    missing = [name for name in names if _version(name) is None]
    if missing:
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        yield Look("connector extra", "missing", f"no {shown}", "pip install 'kvcover[connector]'", _LOOPBACK)
    else:
        yield Look("connector extra", "ok", f"{len(names)} packages, torch {_version('torch')}", tiers=_LOOPBACK)


def _imports(place: Place) -> Iterator[Look]:
    """Of what is installed; what is not, another check says."""
    there = tuple(name for name in NAMES if find_spec(name) is not None) if place.imports else ()
    if not there:
        return
    needed = (*_LOOPBACK, *_HARDWARE)
    if failed := broken(there):
        yield Look("imports", "missing", "; ".join(failed), "mend or reinstall what is named", needed)
    else:
        yield Look("imports", "ok", ", ".join(there), tiers=needed)


def _trees(place: Place) -> Iterator[Look]:
    found = trees()
    if found:
        yield Look("vLLM trees", "ok", ", ".join(tree.name for tree in found), tiers=("connector",))
    else:
        yield Look("vLLM trees", "missing", f"none in {cache()}", f"kvcover vllm add {NEWEST}", ("connector",))


def _two_vllms(place: Place) -> Iterator[Look]:
    """What `confirm` compares in one place: installed, added or registered, by their connector's files."""
    if place.purpose != "confirm":
        return
    known = trees()
    with contextlib.suppress(TierError):
        known.append(installed())
    different = {tree.files: tree.identity.text for tree in known}
    told, needed = ", ".join(different.values()) or "none", (*_LOOPBACK, *_HARDWARE)
    if len(different) > 1:
        yield Look("two vLLMs", "ok", told, tiers=needed)
    else:
        how = "`kvcover vllm add` another, or `kvcover run -o FILE` in each of two containers and then `kvcover confirm FILE FILE`"
        yield Look("two vLLMs", "missing", told, how, needed)


def _memory_of_peers(place: Place) -> Iterator[Look]:
    """Read this process's own memory as the loopback reads its peers': only a seccomp filter can forbid that."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"loopback", 8)
        ranges = [(ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8) for buffer in (here, there)]
        copied = libc.process_vm_readv(os.getpid(), ranges[0], 1, ranges[1], 1, 0)
    except AttributeError:
        copied = -1
    if copied == 8 and here.raw == b"loopback":
        yield Look("process_vm_readv", "ok", "allowed", tiers=_LOOPBACK)
    else:
        how = "docker run --cap-add SYS_PTRACE, or a seccomp profile that allows it"
        yield Look("process_vm_readv", "missing", os.strerror(ctypes.get_errno()), how, _LOOPBACK)


def _yama(place: Place) -> Iterator[Look]:
    scope = place.read("proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, "0"):
        yield Look("ptrace scope", "ok", "processes of one user may reach each other's memory", tiers=_LOOPBACK)
    elif scope == "1":
        yield Look("ptrace scope", "ok", "1: the loopback lets its peers in by prctl", tiers=_LOOPBACK)
    elif scope == "2" and os.geteuid() == 0:
        yield Look("ptrace scope", "ok", "2, and this is root", tiers=_LOOPBACK)
    elif scope in ("2", "3"):
        how = "sysctl kernel.yama.ptrace_scope=1" if scope == "2" else "reboot with kernel.yama.ptrace_scope=1"
        yield Look("ptrace scope", "missing", f"{scope}: the loopback can't move bytes between processes", how, _LOOPBACK)
    else:
        yield Look("ptrace scope", "unknown", f"{scope!r} in kernel.yama.ptrace_scope", "set it to 0 or 1", _LOOPBACK)


def _ports(place: Place) -> Iterator[Look]:
    from kvcover.real_backend.driver.processes import reserve_ports

    try:
        with reserve_ports() as (prefill, _):
            yield Look("ports", "ok", f"128 free in a row from {prefill.handshake}", tiers=_LOOPBACK)
    except TierError as error:
        yield Look("ports", "missing", error.problem, error.hint, _LOOPBACK)


def _room(place: Place) -> Iterator[Look]:
    """Limits that keep even the smallest run, one rank a side, from starting."""
    found = list(lacks(2, 2))
    for text, how in found:
        yield Look("room", "missing", text, how, _LOOPBACK)
    if not found:
        yield Look("room", "ok", "files, tasks, addresses and shared memory for a run", tiers=_LOOPBACK)


def _mori_library(place: Place) -> Iterator[Look]:
    """AMD's own mori.io for `--mori`: nothing needs it, and the connector tier takes it only where it is asked for."""
    here = [each.version for each in added()]
    if here:
        yield Look("mori library", "ok", f"{', '.join(here)} over a software NIC, for --mori")
    elif needs := missing():
        yield Look("mori library", "unknown", "none", f"building it needs {needs}")
    else:
        yield Look("mori library", "unknown", "none", f"kvcover mori add {NEWEST_MORI}, for --mori library")


def _rocm(place: Place) -> Iterator[Look]:
    for base in ("opt/rocm", *(str(path.relative_to(place.root)) for path in sorted(place.root.glob("opt/rocm-*")))):
        version = place.read(f"{base}/.info/version")
        if version:
            good = version.split(".")[0].isdecimal() and int(version.split(".")[0]) >= 7
            how = "" if good else "amd-mori's wheels need ROCm 7"
            yield Look("ROCm", "ok" if good else "missing", f"{version} in /{base}", how, _HARDWARE)
            return
    yield Look("ROCm", "missing", "no /opt/rocm", "use vLLM's ROCm image (vllm/vllm-openai-rocm)", _HARDWARE)


def _gpu(place: Place) -> Iterator[Look]:
    found: dict[str, int] = {}
    for node in sorted(place.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", node.read_text(), re.MULTILINE)
        if match and int(match.group(1)):
            name = _gfx(int(match.group(1)))
            found[name] = found.get(name, 0) + 1
    shown = ", ".join(f"{count} × {name}" for name, count in found.items())
    device = place.root / "dev/kfd"
    if any(name in _ARCHITECTURES for name in found):
        if os.access(device, os.R_OK | os.W_OK):
            yield Look("GPU", "ok", shown, tiers=_HARDWARE)
        else:
            how = "docker run --device /dev/kfd --device /dev/dri --group-add video …"
            yield Look("GPU", "missing", f"{shown}, but /dev/kfd can't be opened", how, _HARDWARE)
    elif found:
        yield Look("GPU", "missing", f"{shown}: not {' or '.join(_ARCHITECTURES)}", "use MI300, MI325, MI350 or MI355", _HARDWARE)
    else:
        yield Look("GPU", "missing", "no AMD GPU", "run it on an MI300-class machine", _HARDWARE)


def _gfx(target: int) -> str:
    """Name a KFD target version: 90402 is gfx942. Minor and stepping are hexadecimal digits."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"


def _torch_rocm(place: Place) -> Iterator[Look]:
    spec = find_spec("torch")  # found, not imported
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    hip = re.search(r"^hip\b[^=]*=\s*'([^']+)'", source.read_text(), re.MULTILINE) if source and source.exists() else None
    if hip:
        yield Look("torch for ROCm", "ok", f"{_version('torch')}, HIP {hip.group(1)}", tiers=_HARDWARE)
    else:
        what = f"torch {_version('torch')} is not built for ROCm" if source else "no torch"
        yield Look("torch for ROCm", "missing", what, "use vLLM's ROCm image, and install nothing over it", _HARDWARE)


def _mori(place: Place) -> Iterator[Look]:
    mori, vllm = _version("amd-mori") or _version("amd_mori"), _version("vllm")
    if vllm is None:
        yield Look("vLLM", "missing", "not installed", "use vLLM's ROCm image (vllm/vllm-openai-rocm)", _HARDWARE)
    else:
        yield Look("vLLM", "ok", vllm, tiers=_HARDWARE)
    wanted = _MORI_OF.get(".".join((vllm or "").split(".")[:2]))
    if mori is None:
        how = f"pip install amd-mori=={wanted}" if wanted else "pip install amd-mori (CPython 3.10 or 3.12)"
        if find_spec("mori") is not None:
            yield Look("mori", "unknown", "there is a mori without package metadata: which version?", how, _HARDWARE)
        else:
            yield Look("mori", "missing", "no amd-mori", how, _HARDWARE)
    elif wanted and _numbers(mori) < _numbers(wanted):
        yield Look("mori", "missing", f"{mori}, vLLM {vllm} is made with {wanted}", f"pip install amd-mori=={wanted}", _HARDWARE)
    else:
        made_with = f"vLLM {vllm} is made with {wanted}" if wanted else "no record of what this vLLM is made with"
        yield Look("mori", "ok", f"{mori}; {made_with}", tiers=_HARDWARE)


def _rdma(place: Place) -> Iterator[Look]:
    links, up = [], False
    for port in sorted(place.root.glob("sys/class/infiniband/*/ports/*")):
        state = (place.read(str(port.relative_to(place.root) / "state")) or "?").split(": ")[-1]
        rate = place.read(str(port.relative_to(place.root) / "rate")) or "rate unknown"
        links.append(f"{port.parts[-3]}/{port.name} {state} {rate}")
        up |= state == "ACTIVE"
    if up:
        yield Look("RDMA", "ok", "; ".join(links), tiers=place.nic)
    elif links:
        yield Look(
            "RDMA",
            "missing",
            f"no link is up: {'; '.join(links)}",
            "see `ip link` and `rdma link`, or use --transport xgmi",
            place.nic,
        )
    else:
        how = "docker run --device /dev/infiniband, the NIC's userspace library; on one host --transport xgmi"
        yield Look("RDMA", "missing", "nothing in /sys/class/infiniband", how, place.nic)


def _memlock(place: Place) -> Iterator[Look]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield Look("memlock", "ok", "unlimited", tiers=place.nic)
    else:
        how = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield Look("memlock", "missing", f"{limit // 1024} KiB: RDMA can't pin a KV cache", how, place.nic)


def _peer(place: Place) -> Iterator[Look]:
    if place.peer is None:
        return
    host, port = parse_peer(place.peer)
    started = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_PEER_LIMIT_S):
            took = (time.monotonic() - started) * 1000
        yield Look("peer", "ok", f"{place.peer} answers in {took:.1f} ms", tiers=(*_LOOPBACK, *_HARDWARE))
    except OSError as error:
        how = "start its listener there (`python -m http.server PORT` will do), open the firewall"
        yield Look("peer", "missing", f"{place.peer}: {error.strerror or error}", how, (*_LOOPBACK, *_HARDWARE))


def parse_peer(text: str) -> tuple[str, int]:
    """Read HOST:PORT, or [HOST]:PORT for IPv6. Raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError("--peer", f"{text!r} is not HOST:PORT", "write 10.0.0.2:6301")
    return host.strip("[]"), int(port)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


CHECKS: tuple[Callable[[Place], Iterator[Look]], ...] = (
    _own_packages,
    _system,
    _connector_extra,
    _imports,
    _trees,
    _two_vllms,
    _memory_of_peers,
    _yama,
    _ports,
    _room,
    _mori_library,
    _rocm,
    _gpu,
    _torch_rocm,
    _mori,
    _rdma,
    _memlock,
    _peer,
)
