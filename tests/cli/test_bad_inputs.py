"""Bad input by the table: every field of a scenario × values that nobody means, every kind of fault × ways to misspell it.

Whatever is given, the answer is a scenario that makes sense, or one InputError that names the place: never another exception,
and never minutes. What a refusal looks like on the command line is `test_malformed.py`.
"""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import InputError, Scenario, build, load, resolve
from kvcover.faults import KINDS
from kvcover.sim.cli import main
from kvcover.sim.results.read import read_results
from kvcover.sim.scenario.complaints import struct_in

DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "minus": -1, "huge": 10**40, "float": 1.5, "inf": float("inf"), "nan": float("nan"), "yes": True, "empty": "", "blank": " ",
    "escape": "\x1b[31m\n", "surrogate": "\ud800", "long": "x" * 5000, "none": None, "list": [], "lists": [[1], {}], "table": {},
    "odd": {"": 1}, "deep": DEEP, "arabic": "٤", "path": "/dev/zero", "home": "~nobody/x", "null": "a\0b",
}  # fmt: skip


def fields(struct: type[msgspec.Struct], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field, however deep."""
    for field in msgspec.structs.fields(struct):
        here = (*place, field.encode_name)
        yield here
        inner = struct_in(field.type)
        if inner is not None:
            yield from fields(inner, (*here, "[]") if "tuple" in str(field.type) and here == ("requests",) else here)


PATHS = sorted(set(fields(Scenario)))


def scenario_with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    data: Any = value
    for part in reversed(path):
        data = [data] if part == "[]" else {part: data}
    return typing.cast("dict[str, Any]", data)


def refusal(data: Any) -> InputError | None:
    """What is said of a scenario; None if it makes sense. Any other exception is the test's failure."""
    try:
        resolve(build(data))
    except InputError as error:
        return error
    return None


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_field_takes_what_makes_sense_and_refuses_the_rest_by_name(path: tuple[str, ...]) -> None:
    refused = 0
    for value in VALUES.values():
        error = refusal(scenario_with(path, value))
        if error is not None:
            refused += 1
            assert path[0] in error.place, (path, value, str(error))
            assert error.problem and len(str(error)) < 1500
    assert refused >= len(VALUES) // 2, "most of the values are wrong anywhere"


def test_the_table_is_long() -> None:
    assert len(PATHS) * len(VALUES) > 1500


BENT = ("{}", "{}:", ":{}", "{}::", "{}:x=", "{}:,", "{}:D99", "{}:D0,ms=", "{}:D0,ms=-1", "{}:D0,ms=nan", "{}:D0,ms=1e999", "{}:0,at=never",
        "{}:write,from=P9", "{}:remote_tp_size=[", "{}:remote_tp_size=nope", "{}:k@nowhere", "{}:k#", "{}:k#x", "{}:k#99", "{}:\x1b", "{}:k=1@prefill#0#0",
        "{}:prefill,tp=0", "{}:D0,ms=1,ms=2", "{}:D0,nosuch=1", "{} :D0", "{}:" + "x" * 3000)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_fault_misspelt(kind: str) -> None:
    errors = [refusal({"faults": [form.format(kind)]}) for form in BENT]
    assert all("faults[0]" in error.place for error in errors if error is not None)
    assert sum(error is not None for error in errors) > len(BENT) // 2


HEAVY: dict[str, dict[str, Any]] = {
    "pools of all DP ranks": {"prefill": {"dp": 255, "num_blocks": 1 << 20}, "model": "layers=32,mla=8", "mode": "read"},
    "requests": {"requests": 4096, "prompt_tokens": 1 << 24},
    "faults": {"faults": ["drop:transfer_id"] * 100_000},
    "layers": {"model": "layers=1024,kv_heads=256,head_dim=8", "prefill": {"tp": 256}, "decode": {"tp": 256}, "requests": 4096},
    "chunks": {"prefill": {"max_tokens_per_step": 1}, "prompt_tokens": 1 << 24, "requests": 4096},
    "lookahead": {"decode": {"lookahead_tokens": 1 << 16, "dp": 256}, "block_size": 1, "requests": 4096},
    "empty release of decode": {"decode_release": ""},
}


@pytest.mark.parametrize("data", HEAVY.values(), ids=HEAVY)
def test_what_would_fill_the_memory_or_run_for_hours_is_refused_at_once(data: dict[str, Any]) -> None:
    started = time.process_time()
    assert refusal(data) is not None
    assert time.process_time() - started < 5


DOTTED = ".".join("a" * 40_000)


@pytest.mark.parametrize(
    "text", [f"{DOTTED} = 1\n", f"x = {{{DOTTED} = 1}}\n", f"[{DOTTED}]\n", f"[[{DOTTED}]]\n", f'"{"a" * 9}".{DOTTED} = 1']
)
def test_a_key_of_forty_thousand_parts_costs_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(InputError, match="nested too deeply"):
        load(path)
    assert time.process_time() - started < 2


def test_a_dotted_name_in_a_string_is_none(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    host = ".".join("a" * 60)
    path.write_text(f'prefill.host = "{host}"\n')
    assert load(path) == {"prefill": {"host": host}}


@pytest.mark.parametrize("name", ["/dev/zero", "huge.toml", "\0", "x" * 300, "folder"])
def test_what_is_no_small_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with open("huge.toml", "wb") as file:
        file.truncate(1 << 33)
    for reader in (load, read_results):
        if reader is read_results and name in ("/dev/zero", "huge.toml"):
            continue  # results may be large, and it takes a quarter of a GB to see that these are too large
        with pytest.raises(InputError):
            reader(name)


def results() -> Iterator[str]:
    """A result, each field of which is something else in turn."""
    from kvcover import run

    whole = run(build({"model": "layers=1,mla=8"})).to_dict()
    for name in whole:
        for value in VALUES.values():
            try:
                yield json.dumps({**whole, name: value})
            except (ValueError, RecursionError):
                continue
        yield json.dumps({key: value for key, value in whole.items() if key != name})


def test_an_edited_result_is_a_result_or_refused(tmp_path: Path) -> None:
    path, counts = tmp_path / "edited.json", [0, 0, 0]
    for text in results():
        path.write_text(text)
        try:
            read_results(path)
        except InputError as error:
            counts[str(path) in error.place] += 1
        else:
            counts[2] += 1
    assert counts[0] == 0, "each refusal names the file"
    assert min(counts[1:]) > 50 and sum(counts) > 600


LINES = (
    ["explore", "--out", ""], ["explore", "--features", ""], ["explore", "--features", "tp,,read"], ["explore", "--jobs", "99999999999"],
    ["explore", "--jobs", "-1"], ["explore", "--baseline", "9.9.9"], ["matrix", "--baseline", ""], ["matrix", "--baseline", "9.9.9"],
    ["matrix", "--baseline", "\0"], ["matrix", "--baseline", "/dev/null"], ["matrix", "--junit", ""], ["matrix", "--junit", "/no/such/x.xml"],
    ["run", "--junit", "/dev/full/x"], ["corpus", "--baseline", "0.33.0"], ["corpus", "--vllm", "x"], ["compare", "/dev/null", "/dev/null"],
    ["compare", "\0", "x"], ["matrix", "-o", "\0"], ["run", "--junit", "\0"], ["run", "--junit", "\ud800"], ["export-test", "\0"], ["export-test", "/dev/null"], ["why", "/dev/zero"], ["replay", "/dev/zero"],
    ["run", "/dev/zero"], ["run", "--model", "/dev"], ["vllm", "add", "~nobody/x"], ["vllm", "add", "x" * 5000], ["vllm", "remove", "~nobody"], ["vllm", "remove", "\0"],
    ["vllm", "add", "x/" * 3000], ["run", "--set", "decode_release="], ["run", "--set", "faults=" + json.dumps(["drop:k"] * 2000)],
)  # fmt: skip


@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:40].replace("\0", "NUL"))
def test_one_line_and_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["kvcover", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("kvcover: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
