"""No command passes what shows nothing: nothing ran, nothing moved, a check failed, a fault never fired, a tier could not run."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcover import Expect, Result, build, run
from kvcover.faults.events import EVENT_KINDS
from kvcover.faults.params import KEY_KINDS
from kvcover.real_backend.machine import doctor, vllm_tests
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.real_backend.machine.trees import Tree
from kvcover.sim.cli import main
from kvcover.sim.errors import TierError
from kvcover.sim.results.result import GOOD, OUTCOMES, FaultFired, Finding
from kvcover.sim.results.verdict import PASS, Verdict, fail, inconclusive, judge_expected, judge_run, together
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search import corpus
from kvcover.sim.search.failures import Exploration, FailureGroup, Signature
from kvcover.sim.tiers import NOT_BEGUN, TIERS, Capabilities, Pace, Tier

MLA = "layers=1,mla=8"
COLLAPSE = ["run", "--release", "0.26.0", "--prefill", "tp=8", "--decode", "tp=8", "--model", "layers=4,mla=64+16"]
BAD = [outcome for outcome in OUTCOMES if outcome not in GOOD]
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def call(words: Sequence[str]) -> tuple[int, str]:
    """Exit code and standard error of a command, run in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["kvcover", *words]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, err.getvalue()


# -- by hand: what once passed ---------------------------------------------------------------------------------------

NOTHING_SHOWN: list[tuple[list[str], int]] = [
    ([*COLLAPSE, "--set", "expect={}", "--check"], 1),
    ([*COLLAPSE, "--set", 'expect={"coverage":0.125}', "--check"], 1),  # as expected, and corrupt
    (["run", "--fault", "drop-notice:write_done", "--set", 'expect={"coverage":1.0}', "--check"], 1),
    (["run", "--fault", "drop:nokey", "--set", 'expect={"outcome":"vacuous"}'], 3),
    (["run", "--fault", "drop:nokey", "--check"], 3),
    (["run", "--fault", "late-rank:D0,ms=3", "--check"], 1),  # the outcome is ok, and a check failed
    (["run", "--fault", "late-rank:D0,ms=3", "--set", 'expect={"outcome":"ok"}'], 1),
    (["run", "--fault", "abort:0,at=before", "--set", 'expect={"outcome":"ok"}'], 3),
    (["run", "--mode", "read", "--set", "prompt_tokens=1", "--check"], 3),  # no block to move
    (["run", "--release", "reference", "--set", "prefill.pp=2", "--check"], 3),  # refused
    (["run", "--release", "0.27.0", "--mode", "read", "--set", 'expect={"outcome":"corrupt"}', "--check"], 1),  # and a race
    (["run", "--decode-release", "", "--check"], 2),
    (["run", "/dev/null", "--check"], 2),
    (["matrix", "--release", "0.26.0", "--prefill", "2", "--decode", "2", "--mode", "write", "--baseline", "0.26.0", "--check"], 2),
    (["corpus", "vllm#47764", "--release", "0.26.0", "--baseline", "0.26.0", "--check"], 2),
    (["matrix", "--prefill", "1", "--decode", "2", "--mode", "write", "--fault", "late-rank:D0,ms=3", "--check"], 1),
    (["run", "--fault", "abort:0,at=before", "--check"], 3),  # nothing moved
    (["matrix", "--release", "reference", "--set", "prefill.pp=2", "--prefill", "1,2", "--decode", "1,2", "--check"], 3),
    (["matrix", "--fault", "drop:nokey", "--prefill", "1,2", "--decode", "1,2", "--check"], 3),
    (["explore", "--budget", "0", "--check"], 3),
    (["explore", "--seeds", "20", "--fault", "drop:nokey", "--check"], 3),
    (["explore", "--seeds", "5", "--features", "fabric", "--fault", "abort:0,at=before", "--jobs", "1", "--check"], 3),
    (["explore", "--seeds", "5", "--features", "", "--check"], 2),
    (["explore", "--seeds", "5", "--features", "keys", "--no-faults", "--check"], 2),
    (["explore", "--seeds", "5", "--set", 'expect={"outcome":"hang"}', "--check"], 1),
    (["explore", "--seeds", "5", "--out", "", "--check"], 2),
    (["corpus", "vllm#47764", "--release", "0.24.0", "--release", "reference", "--check"], 2),
    (["confirm", "--before", "0.26.0", "--after", "reference", "--set", "prefill.pp=2"], 3),
    (["confirm", "--before", "0.26.0", "--after", "0.27.0", "--mode", "read", "--set", "prefill.tp=8", "--set", "decode.tp=8"], 1),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code"), NOTHING_SHOWN, ids=[" ".join(words[:1] + words[-3:]) for words, _ in NOTHING_SHOWN])
def test_what_shows_nothing_is_no_pass(words: list[str], code: int) -> None:
    got, err = call(words)
    assert got == code, err
    assert code != 3 or words[0] == "confirm" or "inconclusive" in err


# -- the judge -------------------------------------------------------------------------------------------------------


def clean() -> Result:
    """A run that passes."""
    return run(build({"release": "0.33.0", "model": MLA, "prompt_tokens": 16}))


def with_check(result: Result, name: str, verdict: str) -> Result:
    checks = [msgspec.structs.replace(each, verdict=verdict) if each.name == name else each for each in result.checks]
    return msgspec.structs.replace(result, checks=checks)


CLEAN = clean()
CHECKS = [check.name for check in CLEAN.checks]
Spoil = Callable[[Result], Result]


def ended(outcome: str) -> Spoil:
    return lambda result: msgspec.structs.replace(result, outcome=outcome, by_request=[outcome])


def failing(name: str) -> Spoil:
    return lambda result: with_check(result, name, "fail")


def unfired(outcome: str) -> Spoil:
    faults = [FaultFired(fault="drop:a", fired=1), FaultFired(fault="drop:b", fired=0)]
    return lambda result: msgspec.structs.replace(result, outcome=outcome, faults=faults)


def unused(name: str, outcome: str) -> Spoil:
    return lambda result: with_check(msgspec.structs.replace(result, outcome=outcome), name, "unknown")


bad_ends = st.sampled_from(BAD).map(ended)
failed_checks = st.sampled_from(CHECKS).map(failing)
never_fired = st.sampled_from(["vacuous", "ok", *BAD]).map(unfired)
nothing_moved = st.builds(unused, st.sampled_from(["coverage-at-go", "no-stray-write"]), st.sampled_from(GOOD))


def test_the_clean_run_passes() -> None:
    assert judge_run(CLEAN) == PASS
    assert judge_run(CLEAN, Expect(outcome="ok", coverage=1.0, by_rank=(1.0,), race=False)) == PASS
    assert judge_expected(CLEAN, Expect()) == PASS


@FEW
@given(st.one_of(bad_ends, failed_checks, never_fired, nothing_moved), st.sampled_from([None, Expect(), Expect(coverage=1.0)]))
def test_one_spoilt_run_passes_nowhere(spoil: Spoil, expect: Expect | None) -> None:
    spoilt = judge_run(spoil(CLEAN), expect)
    assert spoilt.status != "pass"
    assert spoilt.reasons
    assert all(reason and "\n" not in reason for reason in spoilt.reasons)
    whole = together([("good", judge_run(CLEAN)), ("bad", spoilt)])
    assert whole.passed == spoilt.idle, "beside runs that pass, one that was refused is no lack"
    assert not together([("bad", spoilt)]).passed
    assert not together([("good", PASS)], left_out=["it could not be run"]).passed


@FEW
@given(st.sampled_from(BAD), st.sampled_from(["outcome", "coverage", "by_rank", "race", "fault"]))
def test_an_expected_end_leaves_every_other_demand(outcome: str, broken: str) -> None:
    """A scenario that expects a bad end passes with that end, and with nothing else amiss."""
    bad = ended(outcome)(CLEAN)
    expect = msgspec.convert({"outcome": outcome, "coverage": 1.0, "by_rank": [1.0]}, Expect)
    assert judge_run(bad, expect) == judge_run(bad, expect, check=False) == PASS
    if broken == "race":
        assert judge_run(failing("no-race")(bad), expect).status == "fail"
        return
    if broken == "fault":
        assert judge_run(unfired(outcome)(bad), expect, check=False).status == "inconclusive"
        return
    other = {"outcome": "ok", "coverage": 0.5, "by_rank": (0.5,)}[broken]
    for check in (True, False):
        assert judge_run(bad, msgspec.structs.replace(expect, **{broken: other}), check=check).status == "fail"


@pytest.mark.parametrize(("fields", "drawn", "asked"), [
    ({}, "inconclusive", "inconclusive"),
    ({"runs": 2, "outcomes": {"ok": 2}}, "inconclusive", "inconclusive"),  # ok, and none of them moved anything
    ({"runs": 2, "passed": 2}, "pass", "pass"),
    ({"runs": 2, "passed": 2, "ended": "the budget ended"}, "inconclusive", "inconclusive"),
    ({"runs": 2, "passed": 1, "outcomes": {"invalid": 1}}, "pass", "inconclusive"),
    ({"runs": 2, "passed": 1, "outcomes": {"skipped": 1}}, "pass", "inconclusive"),
    ({"runs": 2, "passed": 1, "outcomes": {"skipped": 1}, "lost": 1}, "inconclusive", "inconclusive"),
    ({"runs": 3, "passed": 1, "outcomes": {"vacuous": 1, "skipped": 1}}, "inconclusive", "inconclusive"),
    ({"runs": 3, "passed": 1, "outcomes": {"refused": 2}}, "inconclusive", "inconclusive"),  # idle
    ({"runs": 3, "passed": 1, "outcomes": {"refused": 1}, "known": 1}, "pass", "pass"),  # bad, and so in the baseline
])  # fmt: skip
def test_what_was_asked_for_must_run_and_what_was_drawn_need_not(fields: dict[str, Any], drawn: str, asked: str) -> None:
    found = Exploration(**fields)
    assert (found.verdict(whole=False).status, found.verdict(whole=True).status) == (drawn, asked)


def test_what_showed_nothing_is_counted_by_why() -> None:
    """Of nine runs that neither pass nor fail nor are known from the baseline, the rest used nothing."""
    group = FailureGroup(Signature("hang", "0.33.0", "write", ()), (), 2, (), "seed 1", {})
    found = Exploration(runs=14, passed=2, known=1, outcomes={"vacuous": 2, "invalid": 1, "skipped": 4, "refused": 2})
    found.add(group)
    assert found.moot == {"vacuous": 2, "invalid": 1, "skipped": 4, "idle": 2}


@pytest.mark.parametrize("named", [{"coverage": 0.0}, {"told": ()}, {"by_rank": (0.0,)}, {"outcome": "crash"}])
def test_what_broken_code_leaves_undone_is_not_what_was_expected(named: dict[str, Any]) -> None:
    """A connector with a misspelt name delivers nothing, as the fault that a scenario expects."""
    crash = run(build({"release": "0.33.0", "model": MLA, "prompt_tokens": 16, "faults": ["drop:do_remote_decode@prefill"]}))
    rank = msgspec.structs.replace(crash.by_rank[0], coverage=0.0)
    sets = msgspec.structs.replace(crash.sets, told=[])
    dead = msgspec.structs.replace(crash, outcome="crash", by_request=["crash"], coverage=0.0, by_rank=[rank], sets=sets)
    misspelt = Finding(kind="broken", text="P0: NameError in start_load_kv: x", causes=[])
    expect = Expect(**named)
    assert judge_run(msgspec.structs.replace(dead, findings=[]), expect, check=False).passed
    assert judge_run(msgspec.structs.replace(dead, findings=[misspelt]), expect, check=False).status == "inconclusive"


def test_nothing_at_all_is_no_pass() -> None:
    assert together([]) == inconclusive("nothing was run")
    assert [verdict.exit_code for verdict in (PASS, fail("x"), inconclusive("x"))] == [0, 1, 3]


# -- every command that takes a tier ---------------------------------------------------------------------------------


class Spoilt(Tier):
    """Runs the model, and spoils what came of some of the runs: those whose number is in `hit`, or all."""

    name = "connector"
    can = Capabilities(faults=frozenset({*EVENT_KINDS, *KEY_KINDS}), features=("fabric",), takes_vllm=True,
                       pins={"model": MLA, "prompt_tokens": 16})  # fmt: skip
    spoil: Spoil | None = None
    hit: int | None = None

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        pass

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> list[Result | TierError]:
        found: list[Result | TierError] = []
        for number, scenario in enumerate(scenarios):
            try:
                result: Result | TierError = run(scenario)
                if self.spoil is not None and self.hit in (None, number):
                    result = self.spoil(run(scenario))
            except TierError as error:
                if not keep_errors:
                    raise
                result = error
            found.append(NOT_BEGUN if pace.over() else result)
            pace.done(number, found[-1])
        return found


SPOILT = Spoilt()
REPORTS = [corpus.load_report(file) for file in corpus.corpus_files() if file.name == "vllm-47764.toml"]


def lost(result: Result) -> Result:
    raise TierError("--tier", "rank 0 died", "run it again")


ON_TIER = {
    "run": ["run", "--model", MLA, "--check"],
    "run expecting": ["run", "--model", MLA, "--set", 'expect={"outcome":"ok","race":false}'],
    "matrix": ["matrix", "--model", MLA, "--prefill", "1,2", "--decode", "1,2", "--mode", "write", "--check"],
    "explore": ["explore", "--release", "0.33.0", "--seeds", "4", "--check"],
    "confirm": ["confirm", "--before", "0.26.0", "--after", "0.33.0", "--prefill", "tp=2", "--decode", "tp=2", "--model", MLA],
    "corpus": ["corpus", "vllm#47764", "--release", "0.26.0", "--check"],
}  # fmt: skip


def stock(release: str) -> Tree:
    """A release as it would be if it were here; nothing of it runs."""
    return Tree(None, release, "cache", tuple(KNOWN[release].items()))


def on_tier(name: str, spoil: Spoil | None, hit: int | None, more: Sequence[str] = ()) -> tuple[int, str]:
    spoilt = mock.patch.multiple(SPOILT, spoil=spoil, hit=hit)
    reports = mock.patch.object(corpus, "load_corpus", return_value=REPORTS)  # read once
    trees = mock.patch(
        "kvcover.real_backend.evidence.confirm.trees_of", lambda _tier, scenario, vllm: (stock(vllm or scenario.release),) * 2
    )
    with mock.patch.dict(TIERS, connector=f"{__name__}:SPOILT"), spoilt, reports, trees:
        return call([*ON_TIER[name], "--tier", "connector", *more])


@pytest.mark.parametrize("name", ON_TIER)
def test_a_command_passes_what_is_clean(name: str) -> None:
    assert on_tier(name, None, None) == (0, mock.ANY)


@FEW
@given(st.sampled_from([name for name in ON_TIER if name != "corpus"]), st.data())
def test_no_command_passes_a_spoilt_run(name: str, data: st.DataObject) -> None:
    kinds = {"end": bad_ends, "check": failed_checks, "fault": never_fired, "moved": nothing_moved, "lost": st.just(lost)}
    kind = data.draw(st.sampled_from(sorted(kinds)))
    spoil = data.draw(kinds[kind])
    hit = data.draw(st.sampled_from([None, 0])) if name != "confirm" else data.draw(st.sampled_from([None, 1]))
    if kind == "moved" or (kind == "fault" and name == "explore"):
        hit = None  # beside runs that moved something, one that did not is no lack; nor is what a seed drew
    code, err = on_tier(name, spoil, hit, data.draw(st.sampled_from([(), ("--json",)])))
    assert code in ((2, 3) if kind == "lost" else (1, 3)), err


@FEW
@given(st.one_of(st.sampled_from(["ok", "hang", "failed"]).map(ended), never_fired, st.just(lost)))
def test_a_corpus_passes_no_spoilt_run(spoil: Spoil) -> None:
    assert on_tier("corpus", spoil, 0)[0] in (1, 2, 3)


def test_a_corpus_that_leaves_out_runs_is_no_pass() -> None:
    able = msgspec.structs.replace(SPOILT.can, faults=SPOILT.can.faults - {"drop"})
    with mock.patch.object(Spoilt, "can", able):
        code, err = on_tier("corpus", None, None)
    assert code == 3
    assert "were not run: tier connector can't inject their faults" in err


# -- replay ----------------------------------------------------------------------------------------------------------

FILE = {"release": '"0.26.0"', "prefill": "{tp = 2}", "decode": "{tp = 2}", "model": f'"{MLA}"', "prompt_tokens": "16"}


def replayed(digest: str, expect: str, faults: str = "[]") -> tuple[int, str]:
    fields = FILE | ({"expect": expect} if expect else {}) | {"faults": faults}
    text = (f"# digest {digest}\n" if digest else "") + "".join(f"{name} = {value}\n" for name, value in fields.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.toml"
        path.write_text(text)
        return call(["replay", str(path)])


def test_replay_agrees_with_what_is_so_and_with_nothing_else() -> None:
    built = build({"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}, "model": MLA, "prompt_tokens": 16})
    digest, so = run(built).digest or "", '{outcome = "corrupt", coverage = 0.5}'
    assert run(built).coverage == 0.5, "rank 1 of 2 is never written (vllm#47764)"
    assert [replayed(*each)[0] for each in ((digest, so), ("", so), (digest, ""))] == [0, 0, 0]
    for expect in ('{outcome = "ok"}', "{coverage = 1.0}", "{by_rank = [0.5, 0.5]}", "{race = true}", '{outcome = "vacuous"}'):
        assert replayed(digest, expect)[0] == 1, expect
    assert replayed("0" * len(digest), so)[0] == 1
    assert replayed("", "")[0] == replayed("", "{}")[0] == 3
    assert replayed("", so, '["drop:nokey"]')[0] == 3


# -- vllm-tests and doctor -------------------------------------------------------------------------------------------


@FEW
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=3))
def test_vllm_tests_pass_if_some_passed_and_none_failed(counts: list[tuple[int, int, int]]) -> None:
    files = tuple(vllm_tests.FileCount(f"test_{number}", *count) for number, count in enumerate(counts))
    verdict = vllm_tests.Tally("0.33.0", files, {}, (), 1.0).verdict
    assert verdict.passed == (any(passed for passed, _, _ in counts) and not any(failed for _, failed, _ in counts))
    assert isinstance(verdict, Verdict)


@FEW
@given(st.lists(st.tuples(st.sampled_from(["ok", "missing", "unknown"]), st.booleans()), max_size=4), st.sampled_from(list(TIERS)))
def test_doctor_passes_if_all_that_a_tier_needs_was_found(looks: list[tuple[doctor.State, bool]], tier: str) -> None:
    lines = [doctor.Look("x", state, "", "", (tier,) if needed else ()) for state, needed in looks]
    asked = [state for state, needed in looks if needed]
    verdict = doctor.verdict(lines, tier)
    assert verdict.passed == (set(asked) == {"ok"})
    with mock.patch.object(doctor, "CHECKS", (lambda place: lines,)):
        assert call(["doctor", "--tier", tier])[0] == verdict.exit_code
