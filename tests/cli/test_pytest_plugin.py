"""The pytest plugin and `kvcover export-test`: in a pytest of their own, as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvcover
from kvcover import build, run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(str(kvcover.__file__)).parents[1])}
GOOD = 'release = "0.33.0"\nmodel = "layers=1,mla=8"\ndecode = {tp = 2}\nexpect = {coverage = 1.0}\n'
FILES = {
    "good.toml": GOOD,
    "bad.toml": GOOD.replace("0.33.0", "0.27.0"),
    "known.json": '{"release": "0.26.0", "model": "layers=1,mla=8", "prefill": {"tp": 2}, "decode": {"tp": 2}, '
    '"expect": {"outcome": "corrupt", "coverage": 0.5}}',
    "moot.toml": GOOD + 'faults = ["drop:nokey"]\n',
    "misspelt.toml": GOOD.replace("release", "relase"),
    "expcet.toml": GOOD.replace("expect", "expcet"),
    "broken.toml": GOOD + "[\n",
    "silent.toml": 'release = "0.26.0"\nprefill = {tp = 2}\n',
    "pyproject.toml": '[project]\nname = "x"\n',
    "package.json": "{}",
}
TEST = """
def test_fan_out(kvcover_run):
    assert kvcover_run({"model": "layers=1,mla=8", "decode": {"tp": 2}}).sets.told == ["D0", "D1"]

def test_bad(kvcover_run):
    kvcover_run({"release": "0.26.0", "model": "layers=1,mla=8", "prefill": {"tp": 2}, "decode": {"tp": 2}})

def test_looked_at(kvcover_run):
    bad = {"release": "0.26.0", "model": "layers=1,mla=8", "prefill": {"tp": 2}, "decode": {"tp": 2}}
    assert kvcover_run(bad, check=False).coverage == 0.5
"""


def in_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    installed = list(entry_points(group="pytest11", name="kvcover"))
    plugin = [] if installed else ["-p", "kvcover.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, "--rootdir", str(folder)]
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [*command, "-rA", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return {line[1].split("::")[0].split(" ")[0]: line[0] for line in lines if line and line[0] in ("PASSED", "FAILED", "ERROR")}


def test_files_that_expect_something_are_tests(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = in_pytest(tmp_path, "--kvcover")
    bad = dict.fromkeys(("bad.toml", "moot.toml", "misspelt.toml", "expcet.toml", "broken.toml"), "FAILED")
    assert verdicts(done) == {"good.toml": "PASSED", "known.json": "PASSED", **bad}
    assert "fail: expected coverage 1, got " in done.stdout
    assert "inconclusive: a planned fault never fired" in done.stdout
    assert "relase: no such field" in done.stdout
    assert "Traceback" not in done.stdout
    assert done.returncode == 1


def test_nothing_is_collected_unasked(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(FILES["bad.toml"])
    assert in_pytest(tmp_path).returncode == 5, "no tests"


def test_the_fixture_runs_and_judges(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    done = in_pytest(tmp_path)
    outcomes = {line.split()[1].rpartition("::")[2]: line.split()[0] for line in done.stdout.splitlines() if "::test_" in line}
    assert outcomes == {"test_fan_out": "PASSED", "test_bad": "FAILED", "test_looked_at": "PASSED"}
    assert "see it with: kvcover run --prefill tp=2" in done.stdout


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    code = "import sys, kvcover.pytest_plugin; print([m for m in sys.modules if m.startswith('kvcover.sim') or m in ('numpy', 'simpy', 'msgspec')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


# -- a test for vLLM's tree ----------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    data = {"release": "0.26.0", "model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}}
    result = tmp_path / "bad.json"
    result.write_text(run(build(data)).to_json())
    target = tmp_path / "test_moriio_kvcover.py"
    words = [sys.executable, "-m", "kvcover", "export-test", str(result), "-o", str(target)]
    subprocess.run(words, check=True, capture_output=True, timeout=100)
    return target


def test_an_exported_test_wants_what_a_correct_connector_gives(exported: Path) -> None:
    text = exported.read_text()
    assert 'ALLOWED = ("ok",)' in text
    assert "0.26.0" not in text.split("SCENARIO")[1], "it runs the release under test, not the one that was bad"


def test_an_exported_test_without_its_vllm_is_no_pass(exported: Path, tmp_path: Path) -> None:
    done = in_pytest(tmp_path, str(exported))
    assert " passed" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "outcome": "ok", "coverage": 1}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    words = [sys.executable, "-m", "kvcover", "export-test", str(tmp_path / "x.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and str(tmp_path / "x.json") in done.stderr
