"""pytest plugin: `pytest --kvcover scenarios/` runs scenario files that say what they expect; `kvcover_run` runs one in a test.

Every environment that has kvcover loads this module, so it imports nothing of kvcover until somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result
    from kvcover.sim.results.verdict import Verdict
    from kvcover.sim.scenario.scenario import Expect, Scenario

    KvcoverRun = Callable[..., Result]

_SUFFIXES = (".toml", ".json")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, all of them off."""
    group = parser.getgroup("kvcover", "which KV cells does decode get (vLLM's MoRI-IO connector)")
    group.addoption("--kvcover", action="store_true", help="collect .toml and .json scenario files that have an `expect`")
    group.addoption("--kvcover-tier", default="model", metavar="T", help="where they, and kvcover_run, run (default: model)")
    group.addoption("--kvcover-vllm", default=None, metavar="R|PATH", help="the vLLM that a real tier runs")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A scenario file, if they are asked for. What is not one, such as pyproject.toml, is left alone."""
    if not parent.config.getoption("--kvcover") or file_path.suffix not in _SUFFIXES:
        return None
    return ScenarioFile.from_parent(parent, path=file_path) if _may_expect(file_path) else None


def _may_expect(path: Path) -> bool:
    """Whether a file is a scenario with an `expect`, or looks like one: then its test says what is wrong."""
    from difflib import get_close_matches

    from kvcover.sim.errors import InputError
    from kvcover.sim.scenario.scenario import Scenario, load

    try:
        data = load(path)
        odd = [name for name in data if name not in Scenario.__struct_fields__]
        return "expect" in data or (0 < len(odd) < len(data) and bool(get_close_matches("expect", odd, cutoff=0.75)))
    except InputError:
        try:
            with open(path, "rb") as file:
                return b"expect" in file.read(1 << 20)
        except OSError:
            return False


class ScenarioFile(pytest.File):
    """A file with one scenario, which is one test."""

    def collect(self) -> Iterable[pytest.Item]:
        """The test."""
        yield ScenarioItem.from_parent(self, name="scenario")


class ScenarioItem(pytest.Item):
    """Run the scenario and ask the judge; what is inconclusive fails, as no test may pass that shows nothing."""

    def runtest(self) -> None:
        """Run it. Raises NotAsItShouldBe, or kvcover's InputError."""
        from kvcover.sim.scenario.scenario import build, load

        scenario = build(load(self.path))
        result = _run(self.config, scenario)
        _demand(result, scenario.expect)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """One line and no traceback for what is no fault of the test's code."""
        from kvcover.sim.errors import InputError

        if isinstance(excinfo.value, (NotAsItShouldBe, InputError)):
            return f"{self.path}: {excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is."""
        return self.path, None, f"kvcover: {self.path.name}"


class NotAsItShouldBe(AssertionError):
    """A run did not pass: why, and the command that runs it again."""

    def __init__(self, verdict: Verdict, result: Result) -> None:
        super().__init__(f"{verdict.status}: {verdict.text}\nsee it with: {result.replay}")
        self.verdict, self.result = verdict, result


def _run(config: pytest.Config, scenario: Scenario) -> Result:
    from kvcover.sim.tiers import load_tier

    return load_tier(config.getoption("--kvcover-tier")).run(scenario, config.getoption("--kvcover-vllm"))


def _demand(result: Result, expect: Expect | None) -> None:
    from kvcover.sim.results.verdict import judge_run

    verdict = judge_run(result, expect)
    if not verdict.passed:
        raise NotAsItShouldBe(verdict, result)


@pytest.fixture
def kvcover_run(request: pytest.FixtureRequest) -> KvcoverRun:
    """Run a scenario (a file, plain data or a Scenario) where `--kvcover-tier` says, and give its Result.

    The test fails unless the run passes as `kvcover run --check` would; with `check=False` the test itself looks at the result.
    """

    def run(scenario: str | Path | Mapping[str, Any] | Scenario, *, check: bool = True) -> Result:
        from kvcover.sim.scenario.scenario import Scenario, build, load

        data = load(scenario) if isinstance(scenario, (str, Path)) else scenario
        built = data if isinstance(data, Scenario) else build(data)
        result = _run(request.config, built)
        if check:
            _demand(result, built.expect)
        return result

    return run
