"""The result of a run: the same object from every tier (`--json` prints it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

RESULT_SCHEMA = 1

# From best to worst; a run is as bad as its worst request.
OUTCOMES = ("ok", "refused", "recomputed", "failed", "degraded", "leak", "hang", "crash", "corrupt")
GOOD = ("ok", "refused", "recomputed")
MEANING = {
    "ok": "every decode rank had its cells at go, nothing was held",
    "refused": "a clear error before anything moved, nothing held",
    "recomputed": "decode prefilled locally",
    "failed": "the request ended with an error in bounded time, nothing held",
    "degraded": "right data, but blocks were held until a timer fired",
    "leak": "something is held for ever",
    "hang": "the request never ended, as decode waits for something that never comes",
    "crash": "an engine or its step died, other requests with it",
    "corrupt": "decode ran on missing or wrong cells",
    "vacuous": "a planned fault never fired: the run proves nothing",
}

# What the schema says of a number besides. Files are held to it by `kvcover.sim.results.read`, which names the place.
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1, "unit": "share of cells"})]
Ms = Annotated[float, Meta(extra_json_schema={"minimum": 0, "unit": "ms"})]
Seconds = Annotated[float, Meta(extra_json_schema={"minimum": 0, "unit": "s"})]
OutcomeName = Annotated[str, Meta(extra_json_schema={"enum": [*OUTCOMES, "vacuous"]})]

Shown = Literal["heals", "mitigates", "not shown"]


class RankCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of the cells that one decode rank needs, at go (and at the end); None when it needs none.

    `by_layer` is `coverage` of each layer in order, None for one that needs none; None where the tier doesn't tell.
    """

    dp: int
    tp: int
    coverage: Share | None
    wrong: Share | None
    missing: Share | None
    told: bool | None
    coverage_end: Share | None = None
    by_layer: list[Share | None] | None = None


class Sets(msgspec.Struct, frozen=True, kw_only=True):
    """Who needed, got and was told: their disagreement is the explanation. None: not observable at this tier."""

    needed: list[str]
    written: list[str]
    told: list[str]
    prefill_told: list[str] | None
    prefill_released: list[str] | None


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that went wrong, and why, nearest cause first.

    `shown`, of a run whose causes were flipped, says of each cause whether that `heals` the run, `mitigates` it, or neither.
    """

    kind: str
    text: str
    causes: list[str]
    shown: list[Shown] = []


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a bad run better: so many flips of one thing each, what came of it, and the command that shows it.

    It heals if the outcome is `ok` and no finding is left of those that there were, else it mitigates. `full_size` says whether
    it was tried on the scenario itself, not only on one of fewer layers.
    """

    effect: Literal["heals", "mitigates"]
    flips: list[str]
    outcome: OutcomeName
    coverage: Share
    full_size: bool
    command: str


class Remedies(msgspec.Struct, frozen=True, kw_only=True):
    """What heals or mitigates a bad run, what heals first, fewest flips first; how many flips and pairs of them were tried."""

    tried: int
    pairs: int
    layers: int
    of_layers: int
    seconds: Seconds
    found: list[Remedy]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One named property of the run; unknown is never a pass."""

    name: str
    verdict: Literal["pass", "fail", "unknown"]
    reason: str


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that went, in ms of virtual time."""

    p50: Ms
    p90: Ms
    p99: Ms
    max: Ms


class FaultFired(msgspec.Struct, frozen=True, kw_only=True):
    """How often a planned fault changed something."""

    fault: str
    fired: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one scenario on one tier.

    `backend` says for a real tier what was real: which `mori.io`, which trees, which timers, how the log ended. `remedies` are
    there only if somebody asked for them.
    """

    schema: Annotated[int, Meta(extra_json_schema={"const": RESULT_SCHEMA})] = RESULT_SCHEMA
    tier: str
    release: str
    decode_release: str
    mode: Annotated[str, Meta(extra_json_schema={"enum": ["write", "read"]})]
    model: str
    router: str
    seed: int
    prefill: Annotated[dict[str, int], Meta(description="ranks: `tp` for each of `dp`")]
    decode: Annotated[dict[str, int], Meta(description="ranks: `tp` for each of `dp`")]
    outcome: OutcomeName
    coverage: Annotated[Share, Meta(description="right, at go; at the end if decode never used its cells")]
    coverage_end: Annotated[Share, Meta(description="right, when the run was over")]
    wrong: Annotated[Share, Meta(description="holding something else, when `coverage` was counted")]
    stray: Annotated[
        int | None, Meta(description="cells of others that changed; null if nobody looked", extra_json_schema={"unit": "cells"})
    ]
    by_rank: list[RankCoverage]
    by_request: list[OutcomeName]
    sets: Sets
    findings: list[Finding]
    checks: list[Check]
    faults: list[FaultFired]
    digest: Annotated[
        str | None, Meta(description="of the history: the same for the same scenario and seed; null where time is real")
    ]
    events: Annotated[int, Meta(extra_json_schema={"minimum": 0, "unit": "events"})]
    virtual_ns: Annotated[int | None, Meta(description="when the last event was", extra_json_schema={"unit": "ns"})]
    seconds: Annotated[Seconds, Meta(description="that the run took here")]
    replay: Annotated[str, Meta(description="a command line that runs it again")]
    transfer_ms: Percentiles | None = None
    time_to_go_ms: Percentiles | None = None
    scenario: dict[str, Any] | None = None
    backend: dict[str, Any] | None = None
    remedies: Remedies | msgspec.UnsetType = msgspec.UNSET

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()

    def to_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


STAND_IN, _OVER_NIC = "loopback", " over a software NIC"


def real_mori(version: str) -> str:
    """What `backend.mori` is of a run over the real library on a laptop."""
    return f"real mori.io {version}{_OVER_NIC}"


def mori_text(backend: Mapping[str, Any]) -> str:
    """Which `mori.io` a run had, in words."""
    name = str(backend.get("mori"))
    return name if name.startswith("real ") else f"mori.io: {name}"


def on_one_machine(result: Result) -> bool:
    """Whether its bytes moved in this machine's memory, by the stand-in `mori.io` or by the real one over a NIC in software."""
    mori = (result.backend or {}).get("mori")
    return isinstance(mori, str) and (mori == STAND_IN or mori.endswith(_OVER_NIC))


def caught(result: Result, effects: tuple[str, ...] = ("caught and logged",)) -> list[str]:
    """Errors that a real run's ranks and engines raised, one line each with who raised it. Those not caught are findings, too."""
    told = (result.backend or {}).get("tracebacks")
    who: dict[str, list[str]] = {}
    for each in told if isinstance(told, list) else []:
        if isinstance(each, dict) and each.get("effect") in effects:
            error = " ".join(f"{each.get('error')}: {each.get('text')}".split())
            effect = "" if each["effect"] == "raised" else f", {each['effect']}"
            who.setdefault(f"{error[:200]} ({each.get('place')}){effect}", []).append(str(each.get("rank")))
    return [f"{', '.join(dict.fromkeys(ranks))} raised {what}" for what, ranks in who.items()]


def raced(checks: list[Check]) -> bool:
    """Whether a race was found; not seen is not found."""
    return any(check.name == "no-race" and check.verdict == "fail" for check in checks)


def worst(outcomes: list[str]) -> str:
    """The worst of some outcomes; `vacuous` is decided elsewhere."""
    return max(outcomes, key=OUTCOMES.index, default="ok")
