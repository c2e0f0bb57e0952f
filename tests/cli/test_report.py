"""`kvcover report` as a command: what it takes, what it writes, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run

SMALL: dict[str, Any] = {"model": "layers=2,mla=64+16", "prompt_tokens": 32}


@pytest.fixture
def result(tmp_path: Path) -> str:
    path = tmp_path / "result.json"
    path.write_text(run(build(SMALL)).to_json())
    return str(path)


def test_what_every_command_writes_is_taken(kvcover: Any, tmp_path: Path) -> None:
    small = ("--model", "layers=2,mla=64+16")
    one = ("--prefill", "1,2", "--decode", "2")
    files = {
        "run": ("run", "--release", "0.27.0", *small),
        "matrix": ("matrix", "--release", "0.26.0", *one, *small),
        "corpus": ("corpus", "vllm#47764", "--release", "0.26.0"),
        "compat": ("compat", "--release", "0.27.0", "--router", "wide-ep", *one),
        "explore": ("explore", "--seeds", "20", "--jobs", "1"),
    }
    for name, words in files.items():
        assert kvcover(*words, "-o", str(tmp_path / f"{name}.json"))[0] == 0
    _, out, _ = kvcover("confirm", "--before", "0.26.0", "--after", "0.27.0", "--prefill", "2", "--decode", "2", *small, "--json")
    (tmp_path / "confirm.json").write_text(out)
    places = [str(tmp_path / f"{name}.json") for name in (*files, "confirm")]
    for place in places:
        assert kvcover("report", place, "-o", str(tmp_path / "one.html")) == (0, "", "")
    for name in ("all.html", "all.md"):
        assert kvcover("report", *places, "-o", str(tmp_path / name)) == (0, "", "")
    page, text = ((tmp_path / name).read_text() for name in ("all.html", "all.md"))
    for heading in ("Did the fix help?", "TP pairings", "Router × release", "Public reports", "Explored", "Runs"):
        assert f">{heading}</h2>" in page
    for said in ("**PREDICTED**", "**vLLM 0.26.0, WRITE**", "**Router × release, WRITE**", "`vllm#47764", "**Explored**: 20 runs"):
        assert said in text


def test_an_explorations_arrays_and_lines_are_alike(kvcover: Any, tmp_path: Path) -> None:
    rows = [run(build(SMALL | {"decode": {"tp": tp}})).to_json() for tp in (1, 2)]
    (tmp_path / "a.json").write_text(f"[{','.join(rows)}]")
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    for name in ("a.json", "a.jsonl"):
        assert kvcover("report", str(tmp_path / name), "-o", str(tmp_path / f"{name}.md"))[0] == 0
    assert (tmp_path / "a.json.md").read_text() == (tmp_path / "a.jsonl.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Missing argument 'RESULT…'"),
        (("RESULT",), "Missing option '-o'"),
        (("RESULT", "-o", "report.htm"), "-o: 'report.htm' is no page, Markdown or picture by its name; did you mean '.html'?"),
        (("RESULT", "-o", "report"), "-o: 'report' is no page, Markdown or picture by its name; end it in .html, .md or .png"),
        (("RESULT", "-o", "/no/such/folder/x.html"), "-o: can't write '/no/such/folder/x.html': there is no such folder"),
        (("no-such.json", "-o", "x.html"), "no-such.json: can't be read: No such file or directory"),
        (("RESULT", "-o", "x.html", "--baseline", "no-such.json"), "no-such.json: can't be read"),
        (("RESULT", "-o", "x.png"), "result.json: no matrix, and nothing else makes a picture"),
    ],
)
def test_bad_input_is_one_line(
    kvcover: Any, tmp_path: Path, result: str, monkeypatch: pytest.MonkeyPatch, words: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = kvcover("report", *(result if word == "RESULT" else word for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_a_report_does_not_overwrite_what_it_reads(kvcover: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(run(build(SMALL)).to_json())
    code, _, err = kvcover("report", str(page), "-o", str(page))
    assert code == 2 and "is read by this run, and would be overwritten" in err
    assert json.loads(page.read_text())["schema"] == 1
