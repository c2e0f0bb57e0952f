"""Attempts to have CONFIRMED said of what does not confirm anything: each is told, and none exits with 0."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.sim.cli import main
from tests.real.doubles import real_result

Data = dict[str, Any]
Edit = Callable[[Data, Data], None]
FIELDS: Data = {"model": "layers=2,mla=64+16", "prefill": {"tp": 4}, "decode": {"tp": 4}, "router": "toy-proxy 0.27.0"}
WRONG, NOT, NOTHING = 2, 1, 3


@pytest.fixture
def confirm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["kvcover", "confirm", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert (code == 2) == (err != "") and err.count("\n") <= 1
        return code, out + err

    return call


def pair(tier: str = "connector") -> tuple[Data, Data]:
    """What a fix looks like: every prefill rank writes into decode rank 0, then each into its own."""
    if tier == "model":
        return tuple(json.loads(run(build({**FIELDS, "release": release})).to_json()) for release in ("0.26.0", "0.27.0"))
    return real_result("0.26.0", tier, **FIELDS), real_result("0.27.0", tier, **FIELDS)


def write(folder: Path, before: Any, after: Any) -> tuple[str, str]:
    files = folder / "before.json", folder / "after.json"
    for file, data in zip(files, (before, after), strict=True):
        file.write_text(data if isinstance(data, str) else json.dumps(data) + "\n")
    return str(files[0]), str(files[1])


@pytest.mark.parametrize(
    ("tier", "said"), [("connector", "CONFIRMED: "), ("hardware", "CONFIRMED: "), ("model", "PREDICTED: the model predicts")]
)
def test_an_honest_pair_is_confirmed(tmp_path: Path, confirm: Any, tier: str, said: str) -> None:
    """Without this none of the tests below would say anything."""
    code, out = confirm(*write(tmp_path, *pair(tier)))
    assert (code, out.startswith(said)) == (0, True), out
    assert "0.26.0 is corrupt with coverage 0.25 before" in out and "0.27.0 is ok" in out


def finding(when: int, kind: str, text: str) -> Edit:
    return lambda *both: both[when]["findings"].insert(0, {"kind": kind, "text": text, "causes": ["no fault of the protocol"]})


def put(when: int, **fields: Any) -> Edit:
    return lambda *both: both[when].update(copy.deepcopy(fields))


def outcome(when: int, word: str, at_go: str = "fail") -> Edit:
    """All that an outcome shows in, so that nothing contradicts it."""

    def edit(*both: Data) -> None:
        both[when].update(outcome=word, by_request=[word])
        check(when, "coverage-at-go", at_go)(*both)

    return edit


def check(when: int, name: str, verdict: str) -> Edit:
    def edit(*both: Data) -> None:
        next(each for each in both[when]["checks"] if each["name"] == name)["verdict"] = verdict

    return edit


def covered(when: int, *shares: float) -> Edit:
    """Other coverage of the ranks, with what follows from it."""

    def edit(*both: Data) -> None:
        for rank, share in zip(both[when]["by_rank"], shares, strict=True):
            rank.update(coverage=share, missing=1 - share, wrong=0.0, coverage_end=share)
        both[when].update(coverage=sum(shares) / len(shares), coverage_end=sum(shares) / len(shares))

    return edit


def told(when: int, *names: str) -> Edit:
    def edit(*both: Data) -> None:
        both[when]["sets"]["told"] = list(names)
        for rank in both[when]["by_rank"]:
            rank["told"] = f"D{rank['tp']}" in names

    return edit


def backend(when: int, **fields: Any) -> Edit:
    return lambda *both: both[when]["backend"].update(fields)


def engine(when: int, **fields: Any) -> Edit:
    def edit(*both: Data) -> None:
        for side in ("prefill_vllm", "decode_vllm"):
            both[when]["backend"][side].update(copy.deepcopy(fields))

    return edit


def scenario(when: int, **fields: Any) -> Edit:
    """Made of another scenario, as a whole."""

    def edit(*both: Data) -> None:
        release = both[when]["scenario"].get("release", "0.33.0")
        other = real_result(release, both[when]["tier"], **FIELDS | fields)
        both[when].clear()
        both[when].update(other)

    return edit


def all_of(*edits: Edit) -> Edit:
    def edit(*both: Data) -> None:
        for each in edits:
            each(*both)

    return edit


def rank(when: int, index: int, **fields: Any) -> Edit:
    return lambda *both: both[when]["by_rank"][index].update(fields)


def of_other_release(when: int, release: str) -> Edit:
    def edit(*both: Data) -> None:
        both[when].update(real_result(release, both[when]["tier"], **FIELDS))

    return edit


BEFORE, AFTER = 0, 1
BROKEN = "P0: NameError: name 'x' is not defined (in start_load_kv)"
PATCHED = KNOWN["0.26.0"] | {"moriio_engine.py": "1" * 64}

ATTEMPTS: list[tuple[str, Edit, int, str]] = [
    # bad before, but not in the way that was to be repaired
    ("a name error before", all_of(outcome(BEFORE, "crash"), finding(BEFORE, "broken", BROKEN)), NOTHING, "NameError"),
    ("a name error beside the fault", finding(BEFORE, "broken", BROKEN), NOTHING, "NameError"),
    ("a missing library before", finding(BEFORE, "broken", "D0: OSError: libmori_io.so: cannot open"), NOTHING, "libmori_io.so"),
    ("a refused registration", finding(BEFORE, "broken", "P0: RuntimeError: ibv_reg_mr: Invalid argument"), NOTHING, "ibv_reg_mr"),
    ("ranks that never came up", finding(BEFORE, "stalled", "P0–P3 never came up"), NOTHING, "never came up"),
    ("a hang and no corruption", outcome(BEFORE, "hang"), NOTHING, "outcome corrupt, seen hang"),
    ("a crash and no corruption", outcome(BEFORE, "crash"), NOTHING, "outcome corrupt, seen crash"),
    ("another rank", covered(BEFORE, 0, 1, 0, 0), NOTHING, "D0.0 covered 1, seen 0; D0.1 covered 0, seen 1"),
    ("more ranks", covered(BEFORE, 1, 1, 0, 0), NOTHING, "coverage 0.25, seen 0.5"),
    ("part of a rank", covered(BEFORE, 0.5, 0, 0, 0), NOTHING, "D0.0 covered 1, seen 0.5"),
    ("nobody was told", told(BEFORE), NOTHING, "told D0 D1 D2 D3, seen nobody"),
    ("fewer were told", told(BEFORE, "D0"), NOTHING, "seen D0"),
    ("good before", of_other_release(BEFORE, "0.33.0"), NOT, "nothing to repair"),
    # after that is no pass
    ("a name error after", finding(AFTER, "broken", BROKEN), NOTHING, "after (0.27.0)"),
    ("still corrupt after", all_of(covered(AFTER, 1, 1, 1, 0), outcome(AFTER, "corrupt")), NOT, "still after"),
    ("a hang after", outcome(AFTER, "hang", "unknown"), NOT, "0.27.0 is hang"),
    ("held till a timer after", outcome(AFTER, "degraded", "pass"), NOT, "0.27.0 is degraded"),
    ("refused after", outcome(AFTER, "refused", "unknown"), NOTHING, "nothing was put to the test"),
    ("recomputed after", outcome(AFTER, "recomputed", "unknown"), NOTHING, "nothing was put to the test"),
    ("a race after", check(AFTER, "no-race", "fail"), NOT, "a race"),
    ("a failed check after", check(AFTER, "no-stray-write", "fail"), NOT, "no-stray-write"),
    # one side or the other did not run what it says
    ("labels swapped", all_of(put(BEFORE, release="0.27.0", decode_release="0.27.0"), put(AFTER, release="0.26.0", decode_release="0.26.0")), WRONG, "called 0.27.0, and is 0.26.0"),
    ("files of another release", engine(AFTER, connector_files=KNOWN["0.33.0"]), WRONG, "called 0.27.0, and is 0.33.0"),
    ("the same code", all_of(of_other_release(AFTER, "0.26.0"), covered(AFTER, 1, 1, 1, 1), outcome(AFTER, "ok", "pass")), WRONG, "same connector"),
    ("no files named", engine(AFTER, connector_files={}), WRONG, "which files"),
    ("a patched tree called a release", engine(BEFORE, connector_files=PATCHED), WRONG, "derived from 0.26.0, 1 file differs"),
    ("an unknown connector called a release", engine(BEFORE, connector_files={"moriio_connector.py": "2" * 64}), WRONG, "called 0.26.0"),
    ("rules of another release", lambda b, a: b["scenario"].update(release="0.25.1"), WRONG, "contradicts itself"),
    # mixed up
    ("model and connector", lambda b, a: a.update(pair("model")[1]), WRONG, "connector and the model tier"),
    ("hardware and connector", lambda b, a: a.update(pair("hardware")[1]), WRONG, "connector and the hardware tier"),
    ("another device", backend(AFTER, device="cuda"), WRONG, "in memory of cpu and of cuda"),
    ("another TP", scenario(AFTER, decode={"tp": 2}), WRONG, "two scenarios: decode"),
    ("another mode", scenario(AFTER, mode="read"), WRONG, "two scenarios: mode"),
    ("another seed", scenario(AFTER, seed=7), WRONG, "two scenarios: seed"),
    ("another model", scenario(AFTER, model="layers=4,mla=64+16"), WRONG, "two scenarios: model"),
    ("a fault before alone", scenario(BEFORE, faults=["drop:remote_tp_size@prefill"]), WRONG, "two scenarios: faults"),
    ("another router", scenario(AFTER, router="vllm-router 0.1.17"), WRONG, "so that two things differ"),
    # edited
    ("coverage", put(AFTER, coverage=0.5), WRONG, "coverage is 0.5, and 1 by its ranks"),
    ("coverage before", put(BEFORE, coverage=0.125), WRONG, "by its ranks"),
    ("coverage at the end", put(BEFORE, coverage_end=1.0), WRONG, "coverage_end is 1"),
    ("one rank", rank(AFTER, 0, coverage=0.5), WRONG, "not 1 in all"),
    ("a rank without its share", rank(AFTER, 0, coverage=None), WRONG, "has shares where it has no request"),
    ("a share over 1", rank(AFTER, 0, coverage=1.5, missing=-0.5), WRONG, "1.5 is no share of the cells"),
    ("a rank left out", lambda b, a: a["by_rank"].pop(), WRONG, "ranks are not those"),
    ("outcome", put(AFTER, outcome="refused"), WRONG, "and ok the worst of its requests"),
    ("outcome of all", put(BEFORE, outcome="hang"), WRONG, "and corrupt the worst"),
    ("outcome of a request", put(BEFORE, by_request=["ok"], outcome="ok"), WRONG, "coverage-at-go is fail"),
    ("an unknown outcome", put(AFTER, outcome="great", by_request=["great"]), WRONG, "outcome: 'great' is none"),
    ("two requests of one", put(AFTER, by_request=["ok", "ok"]), WRONG, "2 outcomes of 1 requests"),
    ("told and ranks", lambda b, a: b["sets"].update(told=["D0"]), WRONG, "told are"),
    ("needed", lambda b, a: a["sets"].update(needed=["D0"]), WRONG, "needed"),
    ("checks left out", put(AFTER, checks=[]), WRONG, "checks are not those"),
    ("a fault invented", put(AFTER, faults=[{"fault": "drop:x", "fired": 1}]), WRONG, "faults are not those"),
    ("mode beside the scenario", put(AFTER, mode="read"), WRONG, "mode is 'read', and 'write' in its scenario"),
    ("replay", put(AFTER, replay="kvcover run --tier connector"), WRONG, "replay line"),
    ("no scenario", put(AFTER, scenario=None), WRONG, "contradicts itself"),
    ("a scenario that makes no sense", lambda b, a: a["scenario"].update(mode="wirte"), WRONG, "makes no sense"),
    ("the tier's name", put(AFTER, tier="hardware"), WRONG, "replay line is not of the hardware tier"),
    ("a tier that is none", all_of(put(BEFORE, tier="gpu"), put(AFTER, tier="gpu")), WRONG, "no tier 'gpu'"),
    ("a digest", put(AFTER, digest="0" * 32), WRONG, "has a digest"),
    ("no backend", put(AFTER, backend=None), WRONG, "does not say what ran"),
    ("a word for a number", put(AFTER, coverage="1.0"), WRONG, "Expected `float`, got `str` - at `$.coverage`"),
    ("another schema", put(AFTER, schema=2), WRONG, "schema 2"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "code", "said"), [row[1:] for row in ATTEMPTS], ids=[row[0] for row in ATTEMPTS])
def test_what_does_not_confirm_is_not_confirmed(tmp_path: Path, confirm: Any, edit: Edit, code: int, said: str) -> None:
    before, after = pair()
    edit(before, after)
    got, text = confirm(*write(tmp_path, before, after))
    assert (got, said in text) == (code, True), text
    assert not text.startswith("CONFIRMED")


def test_a_race_that_was_not_looked_for_is_not_repaired(tmp_path: Path, confirm: Any) -> None:
    before, after = (real_result(release, **FIELDS | {"mode": "read", "fabric": "loopback"}) for release in ("0.27.0", "0.33.0"))
    assert before["outcome"] == "ok"
    check(BEFORE, "no-race", "unknown")(before, after)
    code, text = confirm(*write(tmp_path, before, after))
    assert (code, "a race, which this tier does not see" in text) == (3, True), text


ON_HARDWARE: list[tuple[str, Edit, int, str]] = [
    ("no self-test", backend(AFTER, self_test=None), NOTHING, "not tested with a good case"),
    ("a self-test that failed", backend(BEFORE, self_test="one byte was made wrong, and that was not seen"), NOTHING, "not tested"),
    ("the loopback", backend(AFTER, mori="loopback"), WRONG, "its mori.io was 'loopback'"),
    ("another transport", backend(AFTER, mori="amd-mori 1.2.3 over xgmi"), WRONG, "by rdma and by xgmi"),
    ("another TP", scenario(AFTER, decode={"tp": 2}), WRONG, "two scenarios: decode"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "code", "said"), [row[1:] for row in ON_HARDWARE], ids=[row[0] for row in ON_HARDWARE])
def test_what_no_hardware_showed_is_not_confirmed(tmp_path: Path, confirm: Any, edit: Edit, code: int, said: str) -> None:
    before, after = pair("hardware")
    edit(before, after)
    got, text = confirm(*write(tmp_path, before, after))
    assert (got, said in text) == (code, True), text


def test_another_mori_is_said(tmp_path: Path, confirm: Any) -> None:
    before, after = pair("hardware")
    before["backend"]["mori"] = "amd-mori 1.1.0 over rdma"
    code, text = confirm(*write(tmp_path, before, after))
    assert (code, "mori.io differs too: amd-mori 1.1.0 over rdma before, amd-mori 1.2.3 over rdma after" in text) == (0, True)


@pytest.mark.parametrize(
    "edit",
    [put(AFTER, digest="0" * 32), put(AFTER, stray=3), put(BEFORE, events=1), put(AFTER, seed=1), put(AFTER, backend={"mori": "loopback"})],
)  # fmt: skip
def test_a_result_of_the_model_can_not_be_edited(tmp_path: Path, confirm: Any, edit: Edit) -> None:
    before, after = pair("model")
    edit(before, after)
    code, text = confirm(*write(tmp_path, before, after))
    assert (code, "contradicts itself" in text) == (2, True), text


def test_a_patched_tree_is_confirmed_as_what_it_is(tmp_path: Path, confirm: Any) -> None:
    before, after = pair()
    engine(AFTER, connector_files=PATCHED | {"moriio_connector.py": "3" * 64}, vllm="0.27.0")(before, after)
    release = "derived from 0.26.0, 2 files differ"
    for each in ("release", "decode_release"):
        after[each] = f"{release} (my-copy)"
    code, text = confirm(*write(tmp_path, before, after))
    assert (code, f"{release} (my-copy) is ok" in text) == (0, True), text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no result"),
        ("{", "is not JSON"),
        ("[]", "holds no result"),
        ("[" * 100_000, "nested too deeply"),
        ('{"error": ["--tier hardware", "the run failed", ""]}', "holds no result, but why there is none"),
        ('{"schema": 1}', "is no result of kvcover"),
        ('{"schema": 1}\n{"schema": 1}', "holds 2 results"),
        ("\x00", "is not JSON"),
    ],
)
def test_a_file_that_holds_no_result_is_refused(tmp_path: Path, confirm: Any, text: str, said: str) -> None:
    files = write(tmp_path, text, pair()[1])
    code, told = confirm(*files)
    assert (code, said in told) == (2, True), told


def test_one_file_twice_is_refused(tmp_path: Path, confirm: Any) -> None:
    before, _ = write(tmp_path, *pair())
    link = tmp_path / "link.json"
    link.symlink_to(before)
    for second in (before, str(link)):
        code, text = confirm(before, second)
        assert (code, "is the file that is before, too" in text) == (2, True)


@pytest.mark.parametrize("words", [
    ["--prefill", "tp=4"], ["--tier", "connector"], ["--model", "x"], ["--fault", "drop:x"], ["--set", "seed=1"], ["--seed", "1"],
])  # fmt: skip
def test_two_results_take_no_scenario(tmp_path: Path, confirm: Any, words: list[str]) -> None:
    code, text = confirm(*write(tmp_path, *pair()), *words)
    assert (code, "is of a scenario that is yet to run" in text) == (2, True), text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--report", "vllm#47764"], 3, "not what vllm#47764 of 0.26.0 says: 8 decode ranks, seen 4"),
        (["--expect-before", "outcome=corrupt,coverage=0.25,by_rank=1+0+0+0,told=D0+D1+D2+D3"], 0, "as --expect-before says"),
        (["--expect-before", "outcome=corrupt,told=D0+D1+D2+D3"], 0, "as --expect-before says"),
        (["--expect-before", "outcome=corrupt,coverage=0.25"], 0, "as --expect-before says"),
        (["--expect-before", "outcome=corrupt"], 2, "add which ranks were covered"),
        (["--expect-before", "outcome=hang"], 2, "is shown by whatever ends so"),
        (["--expect-before", "outcome=hang,told="], 3, "told nobody, seen D0 D1 D2 D3"),
        (["--expect-before", "outcome=crash,coverage=0.25"], 3, "outcome crash, seen corrupt"),
        (["--expect-before", "outcome=corrupt,told=D0"], 3, "told D0, seen D0 D1 D2 D3"),
        (["--expect-before", "outcome=corrupt,by_rank=0+1+0+0"], 3, "D0.0 covered 0, seen 1"),
        (["--expect-before", "outcome=ok"], 2, "names no bad outcome"),
        (["--expect-before", "coverage=0.25"], 2, "names no bad outcome"),
        (["--expect-before", "outcome=corupt"], 2, "corrupt"),
        (["--expect-before", "coverage=x,outcome=hang"], 2, "'x' is no number"),
        (["--expect-before", "covrage=1"], 2, "coverage"),
        (["--expect-before", "outcome=hang,outcome=hang"], 2, "can't read"),
        (["--expect-before", ""], 2, "no field"),
        (["--report", "vllm#1"], 2, "no report"),
        (["--report", "vllm#47764", "--expect-before", "outcome=hang"], 2, "use one of the two"),
    ],
)
def test_what_must_be_seen_before_can_be_said(tmp_path: Path, confirm: Any, words: list[str], code: int, said: str) -> None:
    got, text = confirm(*write(tmp_path, *pair()), *words)
    assert (got, said in text) == (code, True), text


@pytest.mark.parametrize("kept", [[], 3, ["x"], [{"effect": "raised"}], "own"])
def test_an_error_before_that_nobody_asked_for_is_told(tmp_path: Path, confirm: Any, kept: Any) -> None:
    """`outcome=corrupt` is shown by any error as well: whoever reads the verdict must see which."""
    error = {"rank": "P0", "call": "f", "error": "TypeError", "text": "no\nlen()", "place": "moriio_engine.py:9", "traceback": "",
             "effect": "caught and logged"}  # fmt: skip
    before, after = pair()
    before["backend"]["tracebacks"] = [error, error | {"rank": "P1"}] if kept == "own" else kept
    code, text = confirm(*write(tmp_path, before, after), "--expect-before", "outcome=corrupt,coverage=0.25")
    said = "; before, P0, P1 raised TypeError: no len() (moriio_engine.py:9), caught and logged"
    assert (code, said in text) == (0, kept == "own"), text
