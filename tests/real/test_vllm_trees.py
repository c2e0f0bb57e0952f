"""vLLM source trees: adding, choosing, removing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcover.real_backend.commands.vllm import command
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.machine import trees
from kvcover.sim.errors import InputError, TierError
from tests.real.made_up_trees import hash_made_up, made_up_tree


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path / "cache"))
    hash_made_up(monkeypatch)
    return tmp_path / "cache" / "vllm"


def make_tree(folder: Path, version: str = "") -> Path:
    """What looks like a vLLM."""
    return made_up_tree(folder, version, f"{version}+empty" if version else "")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVCOVER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trees.cache() == tmp_path / "kvcover" / "vllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert trees.cache() == tmp_path / "home" / ".cache" / "kvcover" / "vllm"


def test_a_missing_tree_names_the_command(cache: Path) -> None:
    with pytest.raises(TierError, match=r"kvcover vllm add 0\.27\.0"):
        trees.choose(None, "0.27.0", None)


def test_releases_are_listed_in_order_and_found(cache: Path) -> None:
    for version in ("0.9.0", "0.27.0", "0.26.0"):
        make_tree(cache / version, version)
    (cache / ".partial-0.28.0").mkdir()
    assert [tree.version for tree in trees.trees()] == ["0.9.0", "0.26.0", "0.27.0"]
    prefill, decode = trees.choose(None, "0.26.0", "0.27.0")
    assert (prefill.version, decode.version) == ("0.26.0", "0.27.0")


def test_a_patch_release_with_the_same_connector_serves(cache: Path) -> None:
    make_tree(cache / "0.27.0", "0.27.0")
    assert trees.find("0.27.1").version == "0.27.0"


def test_two_vllms_are_prefill_and_decode(cache: Path, tmp_path: Path) -> None:
    make_tree(cache / "0.27.0", "0.27.0")
    copy = make_tree(tmp_path / "copy")
    prefill, decode = trees.choose(f"0.27.0,{copy}", "0.33.0", None)
    assert (prefill.version, decode.path, decode.version) == ("0.27.0", copy, None)
    with pytest.raises(InputError, match="two as PREFILL,DECODE"):
        trees.choose("a,b,c", "0.33.0", None)


@pytest.mark.parametrize("text", ["nothing", "0.27"])
def test_what_is_no_vllm_is_said(cache: Path, text: str) -> None:
    with pytest.raises(TierError, match="no release and no folder"):
        trees.find(text)


def test_a_folder_without_the_connector_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "vllm").mkdir(parents=True)
    with pytest.raises(TierError, match="no MoRI-IO connector"):
        trees.find(str(tmp_path / "old"))
    with pytest.raises(TierError, match="holds no vllm/"):
        trees.add_working_copy(tmp_path)


def test_the_installed_vllm_is_listed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_tree(tmp_path / "site") / "vllm"
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    shown = CliRunner().invoke(command, ["list"]).output
    assert "installed" in shown and "--vllm installed" in shown and "no vLLM here" not in shown


def test_the_list_says_what_a_tree_is_if_it_calls_itself_something_else(cache: Path) -> None:
    make_tree(cache / "0.27.0", "0.27.0")
    made_up_tree(cache / "0.26.0", "0.33.0", "0.26.0")
    right, wrong = sorted(CliRunner().invoke(command, ["list"]).output.splitlines(), key=len)
    assert right.startswith("0.27.0") and "files" not in right
    assert wrong.startswith("0.26.0") and wrong.endswith("0.33.0 by its connector's files")


def test_a_working_copy_is_registered_and_forgotten_but_never_deleted(cache: Path, tmp_path: Path) -> None:
    copy = make_tree(tmp_path / "copy")
    trees.add_working_copy(copy)
    trees.add_working_copy(copy)
    assert [tree.path for tree in trees.trees()] == [copy]
    trees.remove(str(copy))
    assert trees.trees() == [] and copy.is_dir()


def test_only_own_trees_are_removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "other" / "0.26.0", "0.26.0")
    make_tree(cache / "0.27.0", "0.27.0")
    monkeypatch.setenv("KVCOVER_TREES", str(tmp_path / "other"))
    trees.remove("0.27.0")
    assert [tree.version for tree in trees.trees()] == ["0.26.0"]
    with pytest.raises(InputError, match="kvcover's own"):
        trees.remove("0.26.0")


# -- adding a release; pip is a stand-in -------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a script in the place of pip; `$TARGET` is where it should install."""
    monkeypatch.setattr(trees, "_missing", lambda _names: [])

    def install(body: str) -> None:
        script = tmp_path / "python"
        script.write_text('#!/bin/sh\nwhile [ "$1" != "--target" ]; do shift; done\nTARGET=$2\n' + body)
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


_GOOD = f"""echo Collecting vllm
mkdir -p "$TARGET/{MORIIO_FOLDER}" "$TARGET/vllm-$VLLM_VERSION_OVERRIDE.dist-info"
printf %s "$VLLM_VERSION_OVERRIDE" > "$TARGET/{MORIIO_FOLDER}/moriio_connector.py"
"""


def test_a_release_is_installed_checked_and_moved_into_place(cache: Path, pip: Any) -> None:
    pip(_GOOD)
    said: list[str] = []
    assert trees.add_release("0.27.0", said.append).path == cache / "0.27.0"
    assert trees.find("0.27.0").kind == "cache"
    assert any("Collecting" in line for line in said)
    assert list(cache.glob(".partial*")) == []
    pip("exit 1\n")  # a second time nothing is installed
    trees.add_release("0.27.0", said.append)
    assert "there already" in said[-1]


def test_a_half_installed_release_is_never_a_tree(cache: Path, pip: Any) -> None:
    pip('mkdir -p "$TARGET/vllm"\nexit 1\n')
    with pytest.raises(InputError, match="pip failed"):
        trees.add_release("0.27.0", lambda _line: None)
    assert trees.trees() == []
    (cache / ".partial-0.27.0" / "vllm").mkdir(parents=True)  # as a kill leaves it
    pip(_GOOD)
    trees.add_release("0.27.0", lambda _line: None)
    assert [tree.version for tree in trees.trees()] == ["0.27.0"]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("NewConnectionError: Temporary failure in name resolution\\nERROR: No matching distribution", "can't be reached"),
        ("ERROR: No matching distribution found for vllm==0.27.9", "has no source of vLLM 0.27.9"),
        ("ModuleNotFoundError: No module named 'setuptools_scm'", "setuptools_scm"),
        (
            "  RuntimeError: no CMake\\nerror: metadata-generation-failed\\n× Encountered error while generating",
            "RuntimeError: no CMake",
        ),
        ("  OSError: [Errno 28] No space left on device\\n× Encountered error while generating", "the disk is full"),
    ],
)
def test_why_pip_failed_is_said_in_one_line(cache: Path, pip: Any, output: str, said: str) -> None:
    pip(f"printf '%b\\n' \"{output}\"\nexit 1\n")
    with pytest.raises(InputError, match=said):
        trees.add_release("0.27.9", lambda _line: None)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["torch", "wheel"], r"torch, wheel; install with pip install 'kvcover\[connector\]'"),
        (["setuptools_scm", "wheel"], "install with pip install --no-deps setuptools_scm wheel"),
    ],
)
def test_missing_build_requirements_name_the_extra_only_where_torch_is_missing(
    missing: list[str], said: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "_missing", lambda _names: missing)
    with pytest.raises(InputError, match=said):
        trees.add_release("0.27.0", lambda _line: None)


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "KVCOVER_TREES"} | {"KVCOVER_CACHE": str(tmp_path)}
    listed = subprocess.run([sys.executable, "-m", "kvcover", "vllm", "list"], env=environment, capture_output=True, text=True)
    assert "kvcover vllm add" in listed.stdout
    bad = subprocess.run(
        [sys.executable, "-m", "kvcover", "vllm", "add", "latest"], env=environment, capture_output=True, text=True
    )
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
