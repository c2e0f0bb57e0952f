"""Result files read strictly, and what in them contradicts itself.

A file that was edited or mixed up by accident is found; one that somebody forged with care is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvcover.faults import EventFault
from kvcover.real_backend.machine.identity import Identity, identify
from kvcover.real_backend.tiers.report import ON_GPU
from kvcover.sim.errors import InputError, short
from kvcover.sim.releases.records import ALIASES
from kvcover.sim.results.checkers import CHECKERS
from kvcover.sim.results.read import read_result
from kvcover.sim.results.result import OUTCOMES, RankCoverage, Result, on_one_machine, worst
from kvcover.sim.scenario.scenario import build
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.simulate import replay_line, run
from kvcover.sim.tiers import TIERS

_HINT = "give a file that `kvcover run -o FILE` wrote"
_NEAR = 1e-9
Contradiction = str


def consistent(place: str) -> Result:
    """The result in a file. Raises InputError if it contradicts itself, naming the first contradiction."""
    result = read_result(place)
    if problem := next(contradictions(result), None):
        raise InputError(place, f"contradicts itself: {problem}", "give the file as `kvcover run -o FILE` wrote it")
    return result


def contradictions(result: Result) -> Iterator[Contradiction]:
    """Everything in a result that can't be, by what else it says."""
    try:
        setup = resolve(build(result.scenario or {}))
    except InputError as error:
        yield f"its scenario makes no sense: {error}"
        return
    if result.scenario is None:
        yield "it holds no scenario"
        return
    yield from _of_scenario(result, setup)
    yield from _of_outcomes(result, setup)
    shares = list(_of_ranks(result, setup))
    yield from shares
    if not shares:
        yield from _of_sums(result, setup)
    yield from _of_sets(result, setup)
    yield from _of_model(result, setup) if result.tier == "model" else _of_real(result, setup)


def _of_scenario(result: Result, setup: Setup) -> Iterator[Contradiction]:
    """What stands beside the scenario and in it."""
    scenario = setup.scenario
    sizes = {name: {"tp": side.tp, "dp": side.dp} for name, side in (("prefill", setup.prefill), ("decode", setup.decode))}
    for name, there in {
        "mode": scenario.mode,
        "model": scenario.model,
        "seed": scenario.seed,
        "router": setup.router.name,
        **sizes,
    }.items():
        if (here := getattr(result, name)) != there:
            yield f"{name} is {short(here)}, and {short(there)} in its scenario"
    if [each.fault for each in result.faults] != [str(fault) for fault in setup.faults]:
        yield "its faults are not those of its scenario"
    if not result.replay.removeprefix(ON_GPU).startswith(replay_line(scenario)):
        yield "its replay line is of another scenario"
    if {check.name for check in result.checks} != {checker.name for checker in CHECKERS}:
        yield "its checks are not those of this kvcover"


def _of_outcomes(result: Result, setup: Setup) -> Iterator[Contradiction]:
    if len(result.by_request) != len(setup.requests):
        yield f"{len(result.by_request)} outcomes of {len(setup.requests)} requests"
        return
    if unknown := next((each for each in result.by_request if each not in OUTCOMES), None):
        yield f"there is no outcome {short(unknown)}"
        return
    fired = all(fault.fired > 0 for fault in result.faults)
    wanted = worst(result.by_request) if fired else "vacuous"
    if result.outcome != wanted:
        why = "the worst of its requests" if fired else "as a fault never fired"
        yield f"the outcome is {short(result.outcome)}, and {wanted} {why}"
    at_go = next((check.verdict for check in result.checks if check.name == "coverage-at-go"), None)
    used_short = {"corrupt", "hang", "crash"}.intersection(result.by_request)  # a step that never ended may have used some
    if ("corrupt" in result.by_request and at_go != "fail") or (at_go == "fail" and not used_short):
        yield f"its requests ended as {', '.join(dict.fromkeys(result.by_request))}, and the check coverage-at-go is {at_go}"


def _of_ranks(result: Result, setup: Setup) -> Iterator[Contradiction]:
    """Whether each decode rank is there once, with shares that are shares."""
    decode = setup.decode
    if [(rank.dp, rank.tp) for rank in result.by_rank] != [(dp, tp) for dp in range(decode.dp) for tp in range(decode.tp)]:
        yield "its ranks are not those of its decode engine"
        return
    asked = {request.decode_dp for request in setup.requests}
    if _rerouted(setup):
        asked = {rank.dp for rank in result.by_rank if rank.coverage is not None}
    for rank in result.by_rank:
        name = decode.rank_name(rank.dp, rank.tp)
        shares = [share for share in (rank.coverage, rank.wrong, rank.missing, rank.coverage_end) if share is not None]
        if len(shares) != (4 if rank.dp in asked else 0) or (rank.told is None) != (rank.dp not in asked):
            yield f"{name} has shares where it has no request, or none where it has one"
        elif not all(0 <= share <= 1 for share in shares) or (shares and abs(sum(shares[:3]) - 1) > _NEAR):
            told = ", ".join(f"{share:.6g}" for share in shares[:3])
            yield f"{name} is covered, wrong and missing by {told}, which is not 1 in all"


def _of_sums(result: Result, setup: Setup) -> Iterator[Contradiction]:
    """Whether what all ranks have together is what each has; who got how much is not known if legs went elsewhere."""
    if _rerouted(setup):
        return
    cells = {dp: sum(setup.decode.needed(each) for each in setup.requests if each.decode_dp == dp) for dp in range(setup.decode.dp)}
    weighed = [(cells[rank.dp], rank) for rank in result.by_rank if rank.coverage is not None]
    total = sum(weight for weight, _ in weighed)
    fields: dict[str, Callable[[RankCoverage], float | None]] = {
        "coverage": lambda rank: rank.coverage,
        "wrong": lambda rank: rank.wrong,
        "coverage_end": lambda rank: rank.coverage_end,
    }
    for name, of in fields.items():
        here, there = getattr(result, name), sum(weight * (of(rank) or 0.0) for weight, rank in weighed) / total
        if not math.isclose(here, there, abs_tol=_NEAR):
            yield f"{name} is {here:.6g}, and {there:.6g} by its ranks"
    if result.outcome == "corrupt" and result.coverage >= 1 - _NEAR:
        yield "the outcome is corrupt, and every cell was covered"
    if all(each == "ok" for each in result.by_request) and result.coverage < 1 - _NEAR and _all_asked(setup):
        yield f"every request is ok, and coverage is {result.coverage:.6g}"


def _rerouted(setup: Setup) -> bool:
    """Whether a fault sends requests to other DP ranks than the router chose."""
    return any(isinstance(fault, EventFault) and fault.kind == "wrong-dp" for fault in setup.faults)


def _all_asked(setup: Setup) -> bool:
    """Whether every request runs to its end with what prefill has for it."""
    odd = any(
        each.plain or each.external_zero or each.suffix_only or each.decode_hit_blocks or each.rejected for each in setup.requests
    )
    return not odd and not setup.faults


def _of_sets(result: Result, setup: Setup) -> Iterator[Contradiction]:
    decode, prefill, sets = setup.decode, set(setup.prefill.rank_names()), result.sets
    ranks = {decode.rank_name(rank.dp, rank.tp): rank for rank in result.by_rank}
    if sets.needed != [name for name, rank in ranks.items() if rank.coverage is not None]:
        yield "`needed` are not the ranks that have a request"
    if sets.told != [name for name, rank in ranks.items() if rank.told]:
        yield f"told are {_names(sets.told)}, and {_names([name for name, rank in ranks.items() if rank.told])} by its ranks"
    if not set(sets.written) <= set(ranks):
        yield f"{_names(sets.written)} were written, and not all are decode's"
    for group in (sets.prefill_told, sets.prefill_released):
        if not set(group or ()) <= prefill:
            yield f"{_names(group or [])} are not all prefill's"


def _names(names: list[str]) -> str:
    return short(" ".join(names)) if names else "nobody"


# -- who made it -------------------------------------------------------------------------------------------------


def _of_model(result: Result, setup: Setup) -> Iterator[Contradiction]:
    """The model plays a scenario alike each time: a result of it is right or it is not."""
    again = run(setup.scenario)
    if result.backend is not None:
        yield "it is the model's, and says what real code ran"
    elif result.digest != again.digest:
        yield "the model of this kvcover plays its scenario otherwise (another digest)"
    elif _timeless(result) != _timeless(again):
        yield "the model of this kvcover makes something else of its scenario"


def _timeless(result: Result) -> str:
    """All that is the same in each run, and in each wording."""
    return msgspec.structs.replace(result, seconds=0.0, remedies=msgspec.UNSET, findings=[], replay="").to_json()


def _of_real(result: Result, setup: Setup) -> Iterator[Contradiction]:
    """Whether it says which real code ran, and that is what it calls it."""
    backend = result.backend or {}
    if result.tier not in TIERS:
        yield f"there is no tier {short(result.tier)}"
        return
    if result.digest is not None or result.virtual_ns is not None or not backend:
        yield f"it is of the {result.tier} tier, and has a digest or virtual times, or does not say what ran"
        return
    if f" --tier {result.tier}" not in result.replay:
        yield f"its replay line is not of the {result.tier} tier"
    if (result.tier == "connector") != on_one_machine(result):
        yield f"it is of the {result.tier} tier, and its mori.io was {short(backend.get('mori'))}"
    rules = {"prefill": setup.prefill.release.name, "decode": setup.decode.release.name}
    for side, said in (("prefill", result.release), ("decode", result.decode_release)):
        found = ran(result, side)
        if found is None:
            yield f"it does not say which files {side}'s connector had: it is of an older kvcover"
        elif not _calls_itself(said, found):
            yield f"{side} is called {said}, and is {found.text} by its connector's files"
        elif found.exact and not found.is_release(rules[side]):
            yield f"{side} is {rules[side]} in its scenario, and {found.text} by its connector's files"


def ran(result: Result, side: str) -> Identity | None:
    """Which connector a real result's engine had, by the hashes of its files; None if it doesn't say."""
    try:
        about = msgspec.convert((result.backend or {}).get(f"{side}_vllm"), _About)
    except msgspec.ValidationError:
        return None
    return identify(about.connector_files, about.vllm) if about.connector_files else None


class _About(msgspec.Struct):
    vllm: str
    connector_files: Mapping[str, str]


def _calls_itself(said: str, found: Identity) -> bool:
    """Whether a result's name for what ran fits the connector's files; a working copy's has a folder behind it."""
    if found.exact:
        name = said.split(" ")[0]
        return ALIASES.get(name, name) == found.release
    return said.startswith(found.text) if found.release else said.partition(" (")[0].endswith("no known release")


def files_of(result: Result) -> Any:
    """What decides whether two real results are of the same code: the files of both engines' connectors."""
    backend = result.backend or {}
    return [(backend.get(f"{side}_vllm") or {}).get("connector_files") for side in ("prefill", "decode")]
