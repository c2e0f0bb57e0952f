"""`kvcover vllm-tests`: what it counts, and that vLLM's own tests pass over the loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcover.real_backend.machine import vllm_tests
from kvcover.real_backend.machine.vllm_tests import find_tests, find_tree, run_tests
from kvcover.sim.errors import InputError, TierError
from tests.real.made_up_trees import hash_made_up, made_up_tree

REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="5" time="2.5">
<testcase classname="tests.v1.kv_connector.unit.test_moriio_a" name="test_one[x.y]" time="0.1"/>
<testcase classname="tests.v1.kv_connector.unit.test_moriio_a.TestB" name="test_two"><failure message="assert 1
== 2">long</failure></testcase>
<testcase classname="tests.v1.kv_connector.unit.test_moriio_a" name="test_three">
<skipped type="pytest.skip" message="needs aiter">/x/test_moriio_a.py:3: needs aiter</skipped></testcase>
<testcase classname="" name="tests.v1.kv_connector.unit.test_moriio_b">
<skipped message="collection skipped">('/x/test_moriio_b.py', 21, "Skipped: only on ROCm's image")</skipped></testcase>
<testcase classname="" name="tests.v1.kv_connector.unit.test_moriio_c"><error message="collection failure">x</error></testcase>
</testsuite></testsuites>"""


def test_passed_failed_and_skipped_are_counted_by_file_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    files = [Path(f"tests/v1/kv_connector/unit/test_moriio_{letter}.py") for letter in "abcd"]
    report = vllm_tests._read("0.33.0", tmp_path / "report.xml", files)
    counts = {count.file.removeprefix("test_moriio_"): (count.passed, count.failed, count.skipped) for count in report.files}
    assert counts == {"a": (1, 1, 1), "b": (0, 0, 1), "c": (0, 1, 0), "d": (0, 0, 0)}
    assert [report.total(field) for field in ("passed", "failed", "skipped")] == [1, 2, 2]
    assert report.reasons == {"needs aiter": 1, "only on ROCm's image": 1}
    assert report.failures[0] == "test_moriio_a::test_two: assert 1 == 2"
    assert report.seconds == 2.5


def test_the_tests_of_a_release_are_not_run_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_made_up(monkeypatch)
    tree = made_up_tree(tmp_path / "copy", "0.33.0", "0.26.0")
    with pytest.raises(TierError, match=r"asked for vLLM 0\.26\.0, but vLLM 0\.26\.0 \(0\.33\.0 by its connector's files\)"):
        find_tree("0.26.0", str(tree))
    assert find_tree("0.33.0", str(tree)) == tree


def test_a_checkout_has_its_own_tests_and_only_those_about_moriio_run(tmp_path: Path) -> None:
    unit = tmp_path / "tests/v1/kv_connector/unit"
    unit.mkdir(parents=True)
    (unit / "test_moriio_x.py").write_text("# MoRIIO")
    (unit / "test_nixl.py").write_text("# nothing of it")
    assert find_tests("0.33.0", tmp_path) == tmp_path
    assert [path.name for path in vllm_tests.moriio_files(tmp_path)] == ["test_moriio_x.py"]


def test_an_unknown_release_and_a_tree_without_the_connector_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean '0\.33\.0'"):
        find_tree("0.33.9", None)
    with pytest.raises(TierError, match="holds no vllm/"):
        run_tests("0.33.0", tmp_path)


@pytest.mark.parametrize(("passed", "code"), [(1, 0), (0, 3)])
def test_that_nothing_passed_is_no_pass(passed: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from kvcover.real_backend.commands.vllm_tests import command

    counted = vllm_tests.Tally("0.33.0", (vllm_tests.FileCount("test_moriio_a", passed, 0, 4),), {}, (), 1.0)
    monkeypatch.setattr(vllm_tests, "find_tree", lambda release, vllm: tmp_path)
    monkeypatch.setattr(vllm_tests, "run_tests", lambda release, tree: counted)
    assert CliRunner().invoke(command, ["0.33.0"]).exit_code == code


def test_what_was_skipped_is_said_in_the_closing_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from kvcover.real_backend.commands.vllm_tests import command

    files = (vllm_tests.FileCount("test_moriio_a", 1, 0, 5),)
    counted = [
        vllm_tests.Tally("0.33.0", files, {"no aiter": 4, "no ROCm": 1}, (), 1.0),
        vllm_tests.Tally("0.33.0", (), {}, (), 1.0),
    ]
    monkeypatch.setattr(vllm_tests, "find_tree", lambda release, vllm: tmp_path)
    monkeypatch.setattr(vllm_tests, "run_tests", lambda release, tree: counted.pop(0))
    lines = [CliRunner().invoke(command, ["0.33.0"]).stdout.splitlines()[-1] for _ in range(2)]
    assert lines == [
        "1 passed, 0 failed in 1 s; NOT RUN: 5 skipped, which show nothing, 4 of them for: no aiter",
        "0 passed, 0 failed in 1 s",
    ]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("release", "at_least"), [("0.27.0", 49), ("0.33.0", 632)])
def test_vllm_s_own_tests_pass_over_the_loopback(release: str, at_least: int) -> None:
    pytest.importorskip("torch", reason="NOT RUN: needs the connector extra")
    folder = os.environ.get("KVCOVER_TREES")
    if not folder or not (Path(folder) / release).is_dir():
        pytest.skip(f"NOT RUN: no tree of vLLM {release} in KVCOVER_TREES")
    try:
        report = run_tests(release, Path(folder) / release)
    except TierError as error:
        if "pip can't fetch" in str(error):
            pytest.skip(f"NOT RUN: {error}")
        raise
    assert report.failures == ()
    assert report.total("passed") >= at_least
