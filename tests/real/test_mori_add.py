"""`kvcover mori`: what it needs, what it fetches, and what it says where it can't be built. Nothing is fetched or compiled here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcover.real_backend.inside.mori_kind import SOURCES
from kvcover.real_backend.machine import mori
from kvcover.sim.errors import InputError, TierError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path))
    monkeypatch.delenv("KVCOVER_MORI", raising=False)
    return tmp_path


@pytest.fixture
def buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori, "missing", lambda: "")


def built(version: str, sources: str | None = None) -> Path:
    folder = mori._place(version).folder
    folder.mkdir(parents=True)
    (folder / "built.json").write_text(json.dumps({"version": version, "sources": sources or mori._sources_sha256()}))
    return folder


def test_the_stand_in_runs_unless_something_else_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built("1.2.4")
    assert mori.chosen() is None
    monkeypatch.setenv("KVCOVER_MORI", "stand-in")
    assert mori.chosen() is None


def test_library_is_the_newest_that_was_added_and_a_version_is_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {version: built(version) for version in ("1.2.4", "1.1.1", "1.2.3.post1")}
    assert [each.version for each in mori.added()] == ["1.1.1", "1.2.3.post1", "1.2.4"]
    for asked, version in (("library", "1.2.4"), ("1.1.1", "1.1.1")):
        monkeypatch.setenv("KVCOVER_MORI", asked)
        assert mori.chosen() == mori.Added(version, folders[version])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("library", r"--mori: mori.io 1.2.4 was not added.*kvcover mori add 1.2.4"),
        ("1.2.3", r"--mori: mori.io 1.2.3 was not added.*kvcover mori add 1.2.3"),
        ("1.2.2", r"--mori: mori.io 1.2.2 was built by another kvcover"),
        ("libary", r"--mori: 'libary' is no mori.io here.*stand-in, library"),
    ],
)
def test_what_is_not_there_is_an_error_and_never_the_stand_in(
    cache: Path, monkeypatch: pytest.MonkeyPatch, asked: str, said: str
) -> None:
    built("1.2.2", sources="another")
    monkeypatch.setenv("KVCOVER_MORI", asked)
    with pytest.raises(TierError, match=said):
        mori.chosen()


def test_gpu_memory_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built("1.2.4")
    monkeypatch.setenv("KVCOVER_MORI", "library")
    monkeypatch.setenv("KVCOVER_DEVICE", "cuda")
    with pytest.raises(TierError, match="this machine's memory only"):
        mori.chosen()


def test_an_unknown_version_names_those_that_are_known(cache: Path) -> None:
    with pytest.raises(InputError, match=r"no mori.io 9.9.9 is known here.*1.2.4"):
        mori.add("9.9.9", lambda _line: None)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda patch: patch.setattr("platform.machine", lambda: "aarch64"), "Linux on x86-64, and this is linux on aarch64"),
        (lambda patch: patch.setattr("platform.libc_ver", lambda: ("glibc", "2.31")), "glibc 2.35 or newer, and this machine has glibc 2.31"),
        (lambda patch: patch.setattr("platform.libc_ver", lambda: ("", "")), "this machine has another C library"),
        (lambda patch: patch.setattr("sys.version_info", (3, 14, 0)), "CPython 3.11 to 3.13, and this is cpython 3.14"),
        (lambda patch: patch.setattr(mori, "find_spec", lambda _name: None), "torch, whose headers hold pybind11"),
        (lambda patch: patch.setenv("CXX", "no-such-c++"), "there is no no-such-c++"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(mori, "find_spec", lambda _name: object())
    monkeypatch.setattr(mori, "_pybind11", lambda: cache)
    (cache / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(cache))
    monkeypatch.setattr("shutil.which", lambda name: None if name.startswith("no-such") else name)
    assert mori.missing() == ""
    break_it(monkeypatch)
    with pytest.raises(InputError) as found:
        mori.add("1.2.4", lambda _line: None)
    assert said in str(found.value) and "\n" not in str(found.value)
    assert [each.name for each in cache.iterdir()] == ["Python.h"]


def test_another_wheel_than_the_known_one_is_refused_and_leaves_nothing(
    cache: Path, buildable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(command: list[str], _env: Any, _folder: Path, *_more: Any) -> tuple[int, list[str]]:
        wheel = Path(command[command.index("--dest") + 1]) / "amd_mori-1.2.4-cp310-cp310-manylinux_2_35_x86_64.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("mori/__init__.py", "raise SystemExit('never run')")
        return 0, []

    monkeypatch.setattr(mori, "run_logged", fetch)
    with pytest.raises(InputError, match=r"the wheel that came is another one: SHA-256 [0-9a-f]{64}"):
        mori.add("1.2.4", lambda _line: None)
    assert mori.added() == [] and [each.name for each in mori.home().iterdir()] == [".lock-" + mori._place("1.2.4").folder.name]


def test_no_network_is_one_line(cache: Path, buildable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori, "run_logged", lambda *_args: (1, ["NewConnectionError: Temporary failure in name resolution"]))
    with pytest.raises(InputError, match=r"mori add 1\.2\.4: the package index can't be reached"):
        mori.add("1.2.4", lambda _line: None)


def test_hashes_are_of_all_versions_and_each_its_own() -> None:
    assert len(set(mori.WHEELS.values())) == len(mori.WHEELS) and all(len(each) == 64 for each in mori.WHEELS.values())
    assert list(mori.WHEELS)[-1] == mori.NEWEST


def test_sources_that_changed_are_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    was = mori._sources_sha256()
    (tmp_path / "nic.c").write_bytes(hashlib.sha256(b"").digest())
    monkeypatch.setattr(mori, "SOURCES", tmp_path)
    assert mori._sources_sha256() != was


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    if shutil.which("cc") is None or os.uname().sysname != "Linux":
        pytest.skip("NOT RUN: needs a C compiler on Linux")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-sign-conversion", "-fPIC", "-c", *sources]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
