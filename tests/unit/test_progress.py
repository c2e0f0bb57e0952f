"""Progress is said on stderr where somebody asked for it, with how long it will take, and nowhere else."""

from __future__ import annotations

import time

import pytest

from kvcover.sim import progress
from kvcover.sim.progress import ASKED, each, watched


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)


def test_nothing_is_said_unasked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASKED, raising=False)
    assert list(each([1, 2, 3], "runs")) == [1, 2, 3]
    with watched(lambda: "x"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("asked")
def test_how_far_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in each(range(4), "runs"):
        time.sleep(0.03)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "kvcover: runs, 4 to do"
    assert lines[1].startswith("kvcover: runs: 1 of 4 done in ") and lines[1].endswith(" s left")
    assert lines[-1].startswith("kvcover: runs: 4 of 4 done in ") and "left" not in lines[-1]


@pytest.mark.usefixtures("asked")
def test_one_long_run_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(1000))
    with watched(lambda: f"{next(count)} events"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["kvcover: 0 events", "kvcover: 1 events"]
