"""From what an operator has to causes: what was started, one logged leg, and what was seen.

Each hypothesis is a scenario: the deployment as it was told, or with one thing that nobody told (the router, CUDA graphs, an
event). Those that come to what was seen on the model are told, fewest assumptions first, each with what repairs it: shown
by a run, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kvcover.sim.errors import InputError
from kvcover.sim.releases.records import PUBLISHED
from kvcover.sim.results.result import Finding, Remedies, Result, raced
from kvcover.sim.scenario.dispatch import values_of
from kvcover.sim.scenario.legs_file import OwnLegs
from kvcover.sim.scenario.routers import ROUTERS, Router, get_router, own_router
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.causes import explain
from kvcover.sim.simulate import replay_line, run

SEEN: dict[str, tuple[str, ...]] = {
    "accuracy": ("corrupt", "race"),
    "hang": ("hang",),
    "crash": ("crash",),
    "error": ("failed", "refused"),
    "slow": ("degraded", "recomputed"),
    "memory": ("leak", "degraded"),
}
"""What people say they saw, and the outcomes that look so. Any other text is the line of a crash."""
MOST = 4
_PAIRS_S = 2.0
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception))\b:?\s*(.*)")


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What makes it good: in words, and the command that shows it."""

    text: str
    command: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A hypothesis that comes to what was seen. `assumed` is empty for the deployment as it was told."""

    assumed: str
    outcome: str
    coverage: float
    findings: list[Finding]
    repairs: list[Repair]
    command: str


def diagnose(told: Scenario, own: OwnLegs | None, seen: str) -> list[Cause]:
    """Causes of what was seen, the likelier first; none if nothing that is modelled looks so."""
    causes: list[Cause] = []
    for assumed, scenario in _hypotheses(told, own):
        try:
            result = run(scenario)
        except InputError:
            continue  # it makes no sense together: no such rank, no such mode
        if not _looks_so(result, seen) or any(_same(cause, result) for cause in causes):
            continue
        causes.append(_cause(assumed, scenario, result))
        if len(causes) == MOST:
            break
    return causes


def _looks_so(result: Result, seen: str) -> bool:
    """Whether a run comes to what was seen."""
    if seen in SEEN:
        wanted = SEEN[seen]
        return result.outcome in wanted or ("race" in wanted and result.outcome == "ok" and raced(result.checks))
    if result.outcome != "crash":
        return False
    error = _ERROR.search(seen)
    texts = " ".join(finding.text for finding in result.findings)
    if error is None:
        return any(word in texts for word in re.findall(r"\w{6,}", seen))
    quoted = re.findall(r"'(\w+)'", error[2])
    return error[1] in texts and all(word in texts for word in quoted)


def _same(cause: Cause, result: Result) -> bool:
    """Whether what a likelier cause begins with is here too: then the assumption is not what explains it."""
    return bool(cause.findings) and cause.findings[0].text in {each.text for each in result.findings}


# -- hypotheses --------------------------------------------------------------------------------------------------


def _hypotheses(told: Scenario, own: OwnLegs | None) -> Iterator[tuple[str, Scenario]]:
    """As it was told, then with one assumption each."""
    if own is None:
        yield "", told
        for name in ROUTERS:
            yield f"if the router is {name}", replace(told, router=name)
    else:
        told, said = _with_legs(told, own)
        yield said, told
    if told.mode == "read" and told.decode.cuda_graphs == "none":
        yield "if decode runs under full CUDA graphs", replace(told, decode=replace(told.decode, cuda_graphs="full"))
    if told.prefill.max_tokens_per_step is None:
        tokens = max(told.block_size, told.prompt_tokens // 2)
        yield "if prompts take several steps", replace(told, prefill=replace(told.prefill, max_tokens_per_step=tokens))
    for text, faults in _EVENTS[told.mode]:
        yield f"if {text}", replace(told, faults=(*told.faults, *faults))


_EVENTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "write": [
        ("the router has an older registration of decode, with TP 1", ("stale-registration:decode,tp=1",)),
        ("a transfer fails", ("fail-transfer:write",)),
        ("a completion is lost", ("lose-completion:write",)),
        ("decode's announcement is lost", ("drop-notice:remote_blocks",)),
        ("prefill's word that it is done is lost", ("drop-notice:write_done",)),
        ("a client leaves while decode waits", ("abort:0,at=waiting",)),
        ("prefill's first token is a stop token", ("stop-at-prefill:0",)),
        ("decode preempts a request", ("preempt:0",)),
    ],
    "read": [
        ("the router has an older registration of prefill, with TP 1", ("stale-registration:prefill,tp=1",)),
        ("a read fails", ("fail-transfer:read",)),
        ("a completion is lost", ("lose-completion:read",)),
        ("decode's release is lost", ("drop-notice:release",)),
        ("decode preempts a request", ("preempt:0",)),
    ],
}


def _with_legs(told: Scenario, own: OwnLegs) -> tuple[Scenario, str]:
    """The scenario whose router sends what was logged: a recorded one if its legs are the same, else the nearest and key faults."""
    legs = {side: leg for (mode, side), leg in own.legs.items() if mode == told.mode}
    if not legs:
        raise InputError("--leg", f"the logged leg is of {own.modes()[0].upper()}", f"the engines run {told.mode.upper()}")
    given = replace_legs(get_router("toy-proxy", told.release), told.mode, legs)
    own_router(own, "--leg", "--leg")
    apart = {name: _differences(told, router, given, list(legs)) for name, router in _candidates(told).items()}
    name = min(apart, key=lambda each: len(apart[each]))
    sides = " and ".join(legs)
    if not apart[name]:
        return replace(told, router=name), f"as logged: the {sides} leg is what {name} sends"
    return replace(told, router=name, faults=(*told.faults, *apart[name])), f"as logged, by the {sides} leg"


def replace_legs(router: Router, mode: str, legs: dict[str, Any]) -> Router:
    """The router with these templates in place of its own."""
    return replace(router, forwards_response=False, pins=(), **{f"{mode}_{side}": leg for side, leg in legs.items()})


def _candidates(told: Scenario) -> dict[str, Router]:
    """Recorded routers, that of the release first."""
    own = get_router("toy-proxy", told.release)
    return {own.name: own, **ROUTERS}


def _differences(told: Scenario, router: Router, given: Router, sides: Sequence[str]) -> list[str]:
    """Key faults that make of a router's legs the given ones, for a request on the first DP ranks."""
    setup = resolve(replace(told, router="toy-proxy"))
    values = values_of(setup, setup.requests[0], "$transfer_id")
    answered = ("remote_block_ids", "remote_engine_id", "transfer_id", "remote_host", "remote_handshake_port", "remote_notify_port")
    answer: dict[str, Any] = {key: f"$response.{key}" for key in answered}
    answer |= {"tp_size": setup.prefill.tp, "remote_dp_size": setup.prefill.dp}
    found = []
    for side in sides:
        has, wants = (_filled(each, told.mode, side, values, answer) for each in (router, given))
        for key in {**has, **wants}:
            if key not in wants:
                found.append(f"drop:{key}@{side}")
            elif key == "transfer_id":
                continue
            elif key not in has or json.dumps(has[key]) != json.dumps(wants[key]):
                found.append(f"set:{key}={json.dumps(wants[key])}@{side}")
    return found


def _filled(router: Router, mode: str, side: str, values: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    return router.prefill_leg(mode, values) if side == "prefill" else router.decode_leg(mode, values, answer)


# -- causes and repairs ------------------------------------------------------------------------------------------


def _cause(assumed: str, scenario: Scenario, result: Result) -> Cause:
    explained = explain(scenario)
    repairs = [*_releases(scenario), *_routers(scenario), *_flags(scenario), *_keys(explained)]
    if not repairs:
        repairs = list(_keys(explain(scenario, _PAIRS_S)))
    return Cause(
        assumed=assumed,
        outcome="race" if result.outcome == "ok" else result.outcome,
        coverage=result.coverage,
        findings=explained.findings,
        repairs=repairs,
        command=replay_line(scenario),
    )


def _good(scenario: Scenario) -> bool:
    try:
        result = run(scenario)
    except InputError:
        return False
    return result.outcome == "ok" and not raced(result.checks)


def _releases(scenario: Scenario) -> Iterator[Repair]:
    """The first later release that is good as it stands."""
    for name in PUBLISHED[PUBLISHED.index(scenario.release) + 1 :] if scenario.release in PUBLISHED else ():
        changed = replace(scenario, release=name, decode_release=None)
        if _good(changed):
            yield Repair(text=f"vLLM {name}, the first release with which it is good", command=replay_line(changed))
            return


def _routers(scenario: Scenario) -> Iterator[Repair]:
    """The first later version of the router that is good as it stands."""
    name = resolve(scenario).router.name
    names = [each for each in ROUTERS if each.split()[0] == name.split()[0]]
    for later in names[names.index(name) + 1 :] if name in names else ():
        if _good(changed := replace(scenario, router=later)):
            yield Repair(text=f"{later}, the first version with which it is good", command=replay_line(changed))
            return


def _flags(scenario: Scenario) -> Iterator[Repair]:
    """One flag of `vllm serve` otherwise, at the same release."""
    prefill, decode = scenario.prefill, scenario.decode
    flags: list[tuple[str, Scenario]] = []
    if decode.cuda_graphs != "none":
        flags.append(("--enforce-eager on decode", replace(scenario, decode=replace(decode, cuda_graphs="none"))))
    if prefill.tp != decode.tp:
        flags.append((f"--tensor-parallel-size {prefill.tp} on decode", replace(scenario, decode=replace(decode, tp=prefill.tp))))
    for field, flag in (("block_size", "--block-size"), ("kv_dtype", "--kv-cache-dtype"), ("hybrid_kv", "")):
        if getattr(prefill, field) != getattr(decode, field):
            text = f"{flag or 'the hybrid KV cache manager'} on both sides as on prefill"
            flags.append((text, replace(scenario, decode=replace(decode, **{field: getattr(prefill, field)}))))
    for name, side in (("prefill", prefill), ("decode", decode)):
        if side.tp > 1 and side.dp > 1 and side.pods == 1:
            text = f"a host for each DP rank of {name} (--data-parallel-size-local 1)"
            flags.append((text, replace(scenario, **{name: replace(side, pods=side.dp)})))
    other = "read" if scenario.mode == "write" else "write"
    flags.append((f"read_mode {str(other == 'read').lower()} on both sides: {other.upper()}", replace(scenario, mode=other)))
    yield from (Repair(text=text, command=replay_line(changed)) for text, changed in flags if _good(changed))


def _keys(explained: Result) -> Iterator[Repair]:
    """Keys of the router that heal, and faults that don't happen; policies are vLLM's own, and nobody's to set."""
    remedies = explained.remedies.found if isinstance(explained.remedies, Remedies) else []
    for remedy in remedies:
        policies = [flip for flip in remedy.flips if re.match(r"\w+ = ", flip)]
        if remedy.effect == "heals" and not policies:
            yield Repair(text="; ".join(remedy.flips), command=remedy.command)
