"""AMD's own `mori.io` for the connector tier: `libmori_io.so` of the amd-mori wheel, unchanged, over a NIC in software of ours.

The wheel is fetched as data, never installed. Next to its libraries, which look there first, come ours under the names that they
link (`moriio/library/`), so that no library path is set and nothing of the system's is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvcover.real_backend.inside.mori_kind import SOURCES
from kvcover.real_backend.inside.vllm_setup import user_cache
from kvcover.real_backend.machine.adding import locked, pip_error, run_logged
from kvcover.sim import launch
from kvcover.sim.errors import InputError, TierError
from kvcover.sim.tiers import MORI

WHEELS = {
    "1.1.1": "bedc395a01af4cbe9f627b63e9db8fcfa5fcf81a7792aed1f27e509c7f70cf7d",
    "1.2.0": "4f7fac90ea8416475d1e4423ab7185b9b6982ac6e1c561b76edc4579f7046e51",
    "1.2.1": "a3fc9a8858da3730c48c71fc7495bc98916c1cab394d03681506cf3dd7244463",
    "1.2.2": "c6e87d2a8f3b4c9849f0f22f67d64cb9ad395b10e32664f353ba54b22e84206b",
    "1.2.3": "b2b3b77251af615fc66b94b09649161f4acedc417bfd6fecdfc769ff734274ce",
    "1.2.3.post1": "31c1af3601f2f69084b4c1fa344e651827e1f4ccb9d351ae1f4fdd1dfeb61613",
    "1.2.4": "ba60848d9f10fe2de1848d4d4cd5edbae1f7bb3421c3200b66a3c91f52886e02",
}
"""SHA-256 of the wheels for CPython 3.10 and glibc 2.35 of the versions that can be had, oldest first."""
NEWEST = list(WHEELS)[-1]

_ABSENT = ("libamdhip64.so.7", "libhsa-runtime64.so.1", "libpci.so.3", "libdrm.so.2", "libdrm_amdgpu.so.1", "librocm_smi64.so.1")
_BUNDLED = re.compile(r"amd_mori\.libs/((lib(?:amdhip64|hsa-runtime64|pci|drm|drm_amdgpu|rocm_smi64|ibverbs|numa))-[^/]*)")
_TAKEN = re.compile(r"mori/(libmori_(io|application)\.so|__init__\.py|_version\.py|io/[^/]*\.py)")
_HEADERS = re.compile(r"mori/_jit-sources/(include/mori/(io|utils|hip_compat)|3rdparty/msgpack-c/include/).*")
_NO_HEADERS = ("infiniband/verbs.h", *(f"mori/application/transport/{name}/{name}.hpp" for name in ("rdma", "tcp", "p2p")))
"""Headers of NICs and GPUs that mori's name, and that its calls need nothing of."""
_HAS = {"FABRIC": ("enum.hpp", "FABRIC"), "WAIT_ALL": ("engine.hpp", "WaitAll"), "PEER_FAILURE": ("engine.hpp", "PopPeerFailure")}
_WARN = ("-Wall", "-Wextra", "-fPIC", "-shared")
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Added:
    """A version that was built here: `folder` is what goes on a process's path, for `mori` to be it."""

    version: str
    folder: Path


def home() -> Path:
    """The folder of what `kvcover mori add` builds."""
    return user_cache() / "mori"


def added() -> list[Added]:
    """Every version that was built for this interpreter with the sources of this kvcover, oldest first."""
    return [each for version in WHEELS if _is_whole(each := _place(version))]


def _place(version: str) -> Added:
    return Added(version, home() / f"{version}-{sys.implementation.cache_tag}")


def _is_whole(each: Added) -> bool:
    try:
        return bool(json.loads((each.folder / "built.json").read_text())["sources"] == _sources_sha256())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sources_sha256() -> str:
    files = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def chosen() -> Added | None:
    """What `--mori` or KVCOVER_MORI asks for; None is the stand-in. Raises TierError for what is not there."""
    asked = os.environ.get(MORI) or "stand-in"
    if asked == "stand-in":
        return None
    if asked != "library" and asked not in WHEELS:
        raise TierError("--mori", f"{asked!r} is no mori.io here", f"use stand-in, library, or one of {', '.join(WHEELS)}")
    if os.environ.get("KVCOVER_DEVICE", "cpu") != "cpu":
        raise TierError(
            "--mori", "the library here moves bytes of this machine's memory only", "leave out KVCOVER_DEVICE, or --mori"
        )
    found = [each for each in added() if asked in ("library", each.version)]
    if not found:
        version = NEWEST if asked == "library" else asked
        stale = any((home() / name / "built.json").exists() for name in (_place(each).folder.name for each in (version,)))
        text = "was built by another kvcover" if stale else "was not added"
        raise TierError("--mori", f"mori.io {version} {text}", f"get it with `kvcover mori add {version}`")
    return found[-1]


# -- adding ------------------------------------------------------------------------------------------------------


def missing() -> str:
    """The first thing that building needs and this machine lacks; empty if there is nothing."""
    machine, version = platform.machine(), sys.version_info[:2]
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"Linux on x86-64, and this is {sys.platform} on {machine}"
    name, glibc = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in glibc.split(".")[:2]) < (2, 35):
        return f"glibc 2.35 or newer, and this machine has {f'{name} {glibc}'.strip() or 'another C library'}"
    if sys.implementation.name != "cpython" or not (3, 11) <= version <= (3, 13):
        return f"CPython 3.11 to 3.13, and this is {sys.implementation.name} {version[0]}.{version[1]}"
    if find_spec("torch") is None:
        return "torch, whose headers hold pybind11: pip install 'kvcover[connector]'"
    if not _pybind11().is_dir():
        return f"the headers of torch, which are not in {_pybind11().parent}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"the headers of Python {version[0]}.{version[1]} (Python.h, package python3-dev)"
    for command in (_compiler("CC", "cc"), _compiler("CXX", "c++")):
        if shutil.which(command[0]) is None:
            return f"a C and a C++20 compiler, and there is no {command[0]} (packages gcc and g++, or set CC and CXX)"
    return ""


def _compiler(variable: str, usual: str) -> list[str]:
    return (os.environ.get(variable) or usual).split()


def _pybind11() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "include" / "pybind11"


def add(version: str, say: Callable[[str], None]) -> Added:
    """Fetch and build a version into the cache, and let two engines exchange a batch. Raises InputError if that can't be done."""
    place = f"mori add {version}"
    if version not in WHEELS:
        raise InputError(place, f"no mori.io {version} is known here", f"use one of {', '.join(WHEELS)}")
    if lacks := missing():
        raise InputError(place, f"building needs {lacks}", "")
    final = _place(version)
    try:
        home().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(place, f"can't make {str(home())!r}: {error.strerror}", "set KVCOVER_CACHE to a folder of yours") from None
    with locked(home() / f".lock-{final.folder.name}", place):
        if _is_whole(final):
            say(f"mori.io {version} is there already: {final.folder}")
            return final
        work = home() / f".partial-{final.folder.name}"
        shutil.rmtree(work, ignore_errors=True)
        try:
            (work / "tree").mkdir(parents=True)
            wheel = _fetch(version, work, place, say)
            _unpack(wheel, work)
            say("building NIC and binding (half a minute)")
            _build(work, place)
            _write_down(work / "tree", version)
            _probe(work / "tree", place)
            shutil.rmtree(final.folder, ignore_errors=True)
            (work / "tree").replace(final.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _fetch(version: str, work: Path, place: str, say: Callable[[str], None]) -> Path:
    say(f"fetching the wheel of amd-mori {version} (about 10 MB)")
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    which = ("--python-version", "3.10", "--platform", "manylinux_2_35_x86_64", "--only-binary", ":all:")
    target = ("--no-deps", "--dest", str(work / "wheel"), f"amd-mori=={version}")
    command = launch.python("-m", "pip", "download", *quiet, *which, *target)
    code, lines = run_logged(command, launch.environment(TMPDIR=str(work)), work)
    if code:
        raise pip_error(
            lines, place, f"wheel of amd-mori {version}", "see `kvcover mori list`", "connect to a package index that has it"
        )
    wheel = next((work / "wheel").glob("amd_mori-*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEELS[version]:
        raise InputError(
            place, f"the wheel that came is another one: SHA-256 {digest}, not {WHEELS[version]}", "ask where it comes from"
        )
    return wheel


def _unpack(wheel: Path, work: Path) -> None:
    """Take what is used of the wheel, its licence too: libraries and Python layer as they are, headers for the build alone."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if _TAKEN.fullmatch(name) or name.endswith("licenses/LICENSE"):
                archive.extract(name, work / "tree")
            elif _HEADERS.match(name):
                archive.extract(name, work / "headers")
            elif found := _BUNDLED.match(name):  # an old wheel names the libraries that it brought
                ours = {"libibverbs": "libibverbs.so.1", "libnuma": "libnuma.so.1"}.get(found[2], "libkvcover_absent.so")
                (work / "tree" / "mori").mkdir(exist_ok=True)
                (work / "tree" / "mori" / found[1]).symlink_to(ours)


def _build(work: Path, place: str) -> None:
    mori = work / "tree" / "mori"
    (mori / "0000:01:00.0").mkdir()  # the card's place on the bus, see verbs.c
    cc = [*_compiler("CC", "cc"), "-O2", *_WARN, f"-Wl,--version-script={SOURCES / 'versions.map'}"]
    for name, files in (("libibverbs.so.1", ("nic.c", "verbs.c", "calm.c")), ("libnuma.so.1", ("numa.c",)),
                        ("libkvcover_absent.so", ("absent.c",))):  # fmt: skip
        sources = [str(SOURCES / file) for file in files]
        _compile([*cc, f"-Wl,-soname,{name}", "-o", str(mori / name), *sources, "-lpthread"], place, work)
    for name in _ABSENT:
        (mori / name).symlink_to("libkvcover_absent.so")
    _compile(_binding(work), place, work)


def _binding(work: Path) -> list[str]:
    """The command that compiles our `mori.cpp` against the headers in the wheel."""
    mori, sources, empty = work / "tree" / "mori", work / "headers" / "mori" / "_jit-sources", work / "empty"
    for name in _NO_HEADERS:
        (empty / name).parent.mkdir(parents=True, exist_ok=True)
        (empty / name).write_text("#pragma once\n")
    headers = sources / "include" / "mori" / "io"
    has = [f"-DMORI_HAS_{name}" for name, (file, word) in _HAS.items() if word in (headers / file).read_text()]
    system = (sources / "include", sources / "3rdparty/msgpack-c/include", _pybind11().parent, Path(sysconfig.get_path("include")))
    return [*_compiler("CXX", "c++"), "-O1", "-std=c++20", *_WARN, "-fvisibility=hidden", "-DMSGPACK_NO_BOOST", *has,
            f"-I{empty}", f"-I{SOURCES / 'shadow'}", *(word for folder in system for word in ("-isystem", str(folder))),
            str(SOURCES / "binding.cpp"), "-o", str(mori / f"cpp{sysconfig.get_config_var('EXT_SUFFIX')}"),
            f"-L{mori}", "-lmori_io", "-lmori_application", "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]  # fmt: skip


def _compile(command: list[str], place: str, work: Path) -> None:
    code, lines = run_logged(command, launch.environment(TMPDIR=str(work)), work)
    if code:
        errors = [line for line in lines if "rror" in line] or lines or [f"exit code {code}"]
        raise InputError(
            place, f"{command[0]} failed: {errors[0].strip()[:300]}", "a compiler for C11 and C++20 is needed, such as gcc 12"
        )


def _write_down(tree: Path, version: str) -> None:
    libraries = {name: _sha256(tree / "mori" / name) for name in ("libmori_io.so", "libmori_application.so")}
    told = {"version": version, "wheel": WHEELS[version], "sources": _sources_sha256(), "libraries": libraries}
    (tree / "built.json").write_text(json.dumps(told, indent=1) + "\n")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _probe(tree: Path, place: str) -> None:
    """Let two engines of a process of its own exchange a batch."""
    code, lines = run_logged(launch.python("-m", "kvcover.real_backend.inside.mori_probe", str(tree)), launch.environment(), tree)
    if code or lines[-1:] != ["exchanged"]:
        text = "; ".join(_told(lines)) or f"it ended with {code}"
        raise InputError(place, f"it was built, and two engines exchange nothing: {text}", "report it")


def _told(lines: list[str]) -> Iterator[str]:
    yield from (line.strip()[:200] for line in lines[-2:])
