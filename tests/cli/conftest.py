"""The command line, called in this process."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kvcover.sim.cli import main


@pytest.fixture
def kvcover(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kvcover", *words])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
