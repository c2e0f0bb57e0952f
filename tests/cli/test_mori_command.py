"""`--mori` and `kvcover mori`, as people see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcover.real_backend.machine import mori


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_CACHE", str(tmp_path))
    monkeypatch.setenv("KVCOVER_MORI", "stand-in")  # an option writes it: this puts it back


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--mori", "library", "--model", "layers=2,mla=8", "--prefill", "2", "--decode", "2"],
        ["matrix", "--mori", "1.2.4"],
        ["explore", "--mori", "library", "--seeds", "1"],
        ["corpus", "--mori", "library"],
        ["confirm", "--before", "0.26.0", "--after", "0.27.0", "--mori", "library"],
        ["run", "--mori", "stand-in", "--tier", "hardware"],
    ],
)
def test_a_tier_that_runs_no_mori_of_yours_refuses_the_option(kvcover: Any, words: list[str]) -> None:
    code, out, err = kvcover(*words)
    assert code == 2 and out == ""
    assert "--mori" in err and "runs no mori.io of yours" in err and "use --tier connector" in err


def test_list_says_what_can_be_had(kvcover: Any) -> None:
    code, out, _ = kvcover("mori", "list")
    assert code == 0 and all(f"{version} " in out for version in mori.WHEELS)


def test_an_unknown_version_is_one_line(kvcover: Any) -> None:
    code, out, err = kvcover("mori", "add", "9.9.9")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "mori add 9.9.9: no mori.io 9.9.9 is known here" in err and "1.2.4" in err
