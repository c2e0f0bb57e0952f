"""What one bad key of one leg does: every key × what is wrong with it × leg × mode, on the model of a release.

The first request has the bad key, since peers that have met don't meet again; the one after it says whether it is bad for that
request alone or for everybody. A value of another request needs one before: it is over when the bad one comes (`stale`), or
comes with it (`other`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvcover.faults.params import LEGS, LegName
from kvcover.sim.results.result import GOOD
from kvcover.sim.scenario.scenario import Scenario, build
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.legs_read import read_by_engines
from kvcover.sim.simulate import run_world

Trouble = Literal["missing", "null", "wrong type", "wrong value", "stale", "other"]
TROUBLES: dict[Trouble, str] = {
    "missing": "the key is not sent",
    "null": "it is null",
    "wrong type": "it is the text \"x\", or an empty list where a text belongs",
    "wrong value": "it has a value of the right type that is not true",
    "stale": "it is that of the request before, which is over",
    "other": "it is that of another request, which is under way",
}  # fmt: skip
_GAP_NS = 400_000_000
_TEXTS = ("transfer_id", "remote_engine_id", "remote_host")
_WRONG: dict[str, Any] = {
    "transfer_id": "another", "remote_engine_id": "another", "remote_host": "192.0.2.1", "remote_handshake_port": 1,
    "remote_notify_port": 1, "remote_tp_size": 1, "tp_size": 1, "remote_dp_size": 2, "remote_dp_rank": 1, "remote_dp_size_local": 2,
    "remote_hosts": ["192.0.2.1"], "is_request_leader": False, "remote_dp_rank_override": True,
}  # fmt: skip


class KeyCase(msgspec.Struct, frozen=True, kw_only=True):
    """One bad key. `fault` is empty where nothing can be wrong with it in this way, and `why` says so.

    `read`: whether the engine asks for the key at all, as the model has it.
    """

    release: str
    mode: str
    leg: LegName
    key: str
    trouble: Trouble
    read: bool
    fault: str = ""
    why: str = ""
    scenario: Scenario | None = None

    @property
    def bad(self) -> int:
        """The request whose leg has the bad key."""
        return _bad(self.trouble)

    @property
    def id(self) -> str:
        """Its name, which sorts well."""
        return "/".join((self.release, self.mode, self.leg, self.key, self.trouble.replace(" ", "-")))


class KeyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a bad key led to: for its own request, and whether others ended badly as well."""

    outcome: str
    everybody: bool


def outcome_of(case: KeyCase, by_request: Sequence[str]) -> KeyOutcome:
    """Of the run of a case."""
    others = [outcome for request, outcome in enumerate(by_request) if request != case.bad]
    return KeyOutcome(outcome=by_request[case.bad], everybody=any(outcome not in GOOD for outcome in others))


def key_cases(release: str, mode: str, router: str = "toy-proxy") -> Iterator[KeyCase]:
    """Every key that is sent or asked for, by leg, in the order of the leg, with all that can be wrong with it."""
    base = _scenario(release, mode, router)
    _, legs = read_by_engines(base)
    for leg in LEGS:
        for reading in legs[leg]:
            for trouble in TROUBLES:
                case = KeyCase(release=release, mode=mode, leg=leg, key=reading.key, trouble=trouble, read=reading.read)
                fault, why = _fault(leg, reading.key, trouble, reading.value, reading.sent)
                if why:
                    yield msgspec.structs.replace(case, why=why)
                    continue
                scenario = _scenario(release, mode, router, fault, trouble)
                yield msgspec.structs.replace(case, fault=fault, scenario=scenario)


def run_case(case: KeyCase) -> KeyOutcome | None:
    """What the model says of it; None where nothing can be wrong, or the value is the same in all requests."""
    if case.scenario is None:
        return None
    result = run_world(resolve(case.scenario))[0]
    return None if result.outcome == "vacuous" else outcome_of(case, result.by_request)


def _fault(leg: str, key: str, trouble: Trouble, value: Any, sent: bool) -> tuple[str, str]:
    """The key fault, or why there is none."""
    if trouble in ("missing", "stale", "other") and not sent:
        return "", "not sent"
    if trouble == "missing":
        return f"drop:{key}@{leg}#{_bad(trouble)}", ""
    if trouble in ("stale", "other"):
        return f"stale:{key}@{leg}#{_bad(trouble)}", ""
    other = {"null": None, "wrong type": [] if key in _TEXTS else "x"}[trouble] if trouble != "wrong value" else _wrong(key, value)
    if sent and json.dumps(other) == json.dumps(value):
        return "", "as it is sent"
    return f"set:{key}={json.dumps(other)}@{leg}#{_bad(trouble)}", ""


def _wrong(key: str, value: Any) -> Any:
    """Another value of the right type."""
    if key in _WRONG:
        return _WRONG[key]
    if key == "remote_block_ids":
        return [[14, 15, 13, 1]] if value is None or (value and isinstance(value[0], list)) else [14, 15, 13, 1]
    if isinstance(value, bool) or key.startswith("do_"):
        return not value
    return value + 1 if isinstance(value, (int, float)) else "another"


def _bad(trouble: Trouble) -> int:
    return int(trouble in ("stale", "other"))


def _scenario(release: str, mode: str, router: str, fault: str = "", trouble: Trouble = "missing") -> Scenario:
    """Blocks differ on the two sides, so that what goes astray shows; blocks 13 to 15 are nobody's."""
    arrivals = {"stale": (0, _GAP_NS, 2 * _GAP_NS), "other": (0, 0, 2 * _GAP_NS)}.get(trouble, (0, _GAP_NS))
    blocks = (([1, 2, 3, 4], [12, 10, 11, 9]), ([5, 6, 7, 8], [3, 1, 4, 2]), ([9, 10, 11, 12], [8, 6, 5, 7]))
    requests = [
        {"arrival_ns": at, "prefill_blocks": prefill, "decode_blocks": decode}
        for at, (prefill, decode) in zip(arrivals, blocks, strict=False)
    ]
    side = {"tp": 2, "num_blocks": 16}
    return build(
        {"release": release, "mode": mode, "router": router, "model": "layers=2,mla=64+16", "kv_dtype": "fp32", "prompt_tokens": 64,
         "prefill": side, "decode": side, "requests": requests, "fabric": "loopback", "faults": [fault] if fault else []}
    )  # fmt: skip
