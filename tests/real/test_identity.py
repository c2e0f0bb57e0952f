"""A vLLM is what the files of its connector are, whatever it calls itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER, connector_files
from kvcover.real_backend.machine import trees
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.real_backend.machine.identity import identify
from kvcover.sim.errors import InputError, TierError
from kvcover.sim.releases.records import PUBLISHED
from tests.real.linked_tree import linked_tree
from tests.real.made_up_trees import hash_made_up, made_up_tree
from tests.real.test_connector_tier import needs

OWN = {"moriio_connector.py": "0" * 64}


def test_every_release_is_known_and_no_two_are_alike() -> None:
    assert tuple(KNOWN) == PUBLISHED
    assert len({tuple(files.items()) for files in KNOWN.values()}) == len(PUBLISHED)


@pytest.mark.vllm
@pytest.mark.parametrize("release", PUBLISHED)
def test_the_hashes_are_those_of_the_official_sources(trees: Path, release: str) -> None:
    if not (trees / release).is_dir():
        pytest.skip(f"NOT RUN: no tree of vLLM {release} in KVCOVER_TREES")
    assert connector_files(trees / release) == KNOWN[release]


@pytest.mark.parametrize("said", [None, "0.26.0", "0.33.0", "0.26.1.dev350", "nonsense"])
@pytest.mark.parametrize("release", PUBLISHED)
def test_the_files_of_a_release_are_that_release_whatever_it_is_called(release: str, said: str | None) -> None:
    found = identify(KNOWN[release], said)
    assert (found.exact, found.text) == (True, release)


@pytest.mark.parametrize(
    ("files", "said", "text"),
    [
        (KNOWN["0.27.0"] | OWN, None, "derived from 0.27.0, 1 file differs"),
        (KNOWN["0.27.0"] | OWN, "0.33.0", "derived from 0.27.0, 1 file differs"),
        (KNOWN["0.33.0"] | {"moriio_new.py": "0" * 64}, None, "derived from 0.33.0, 1 file differs"),
        ({k: v for k, v in KNOWN["0.33.0"].items() if k != "moriio_heartbeat.py"}, None, "derived from 0.33.0, 1 file differs"),
        # what is the same in several releases says nothing; then its own word does
        ({k: v for k, v in KNOWN["0.25.1"].items() if k != "moriio_connector.py"} | OWN, "0.25.1.dev1", "derived from 0.25.1, 1 file differs"),
        (OWN, "0.26.0", "derived from 0.26.0, 5 files differ"),
        (OWN, None, "no known release"),
        (OWN, "0.26.1.dev350", "no known release"),  # on its way to no known release
        ({"__init__.py": KNOWN["0.24.0"]["__init__.py"]}, None, "no known release"),
        ({}, "0.26.0", "no known release"),
    ],
)  # fmt: skip
def test_what_is_no_release_is_named_after_the_nearest(files: dict[str, str], said: str | None, text: str) -> None:
    found = identify(files, said)
    assert (found.text, found.exact) == (text, False)
    assert not any(found.is_release(release) for release in PUBLISHED)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path / "cache"))
    hash_made_up(monkeypatch)
    return tmp_path / "cache" / "vllm"


def test_a_tree_that_calls_itself_another_release_is_refused_by_that_name(cache: Path) -> None:
    tree = made_up_tree(cache / "0.26.0", "0.33.0", "0.26.0")
    with pytest.raises(
        TierError, match=r"calls itself vLLM 0\.26\.0, and by its connector's files it is 0\.33\.0; .*vllm add 0\.26\.0"
    ):
        trees.find("0.26.0")
    assert trees.find(str(tree)).identity.text == "0.33.0"  # by its path it is what it is


def test_a_changed_tree_is_taken_by_its_path_alone(cache: Path) -> None:
    tree = made_up_tree(cache / "0.26.0", "0.26.0 with a patch", "0.26.0")
    with pytest.raises(TierError, match=r"derived from 0\.26\.0, 1 file differs"):
        trees.find("0.26.0")
    given = trees.find(str(tree))
    assert (given.identity.text, given.identity.exact) == ("derived from 0.26.0, 1 file differs", False)
    assert trees.release_of(given, "0.26.0") == "0.26.0"
    with pytest.raises(InputError, match=r"is not the 0\.27\.0 that the scenario asks for"):
        trees.release_of(given, "0.27.0")
    with pytest.raises(TierError, match="give a vLLM by its folder"):
        trees.refuse_other_release(given, "0.26.0", "--tier hardware")


@pytest.mark.vllm
def test_a_renamed_real_tree_is_refused_by_name_and_named_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("0.33.0")
    tree = linked_tree(tmp_path / "vllm" / "0.26.0", "0.33.0", f"{MORIIO_FOLDER}/moriio_connector.py")
    for info in tree.glob("vllm-*.dist-info"):
        info.rename(tree / "vllm-0.26.0.dist-info")
    (tree / "vllm" / "_version.py").unlink(missing_ok=True)
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path))
    monkeypatch.delenv("KVCOVER_TREES", raising=False)
    with pytest.raises(TierError, match=r"calls itself vLLM 0\.26\.0, and by its connector's files it is 0\.33\.0"):
        trees.find("0.26.0")
    assert trees.find(str(tree)).identity.text == "0.33.0"
