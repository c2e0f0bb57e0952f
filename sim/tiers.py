"""The tiers: where a scenario can be run, what each of them can do, and the protocol that commands and searches rely on.

`load_tier` imports a tier when it is asked for, so that the model needs no backend. A tier declares what it can do, and
whatever it is asked beyond that is refused here, up front and by name.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import msgspec

from kvcover.sim.errors import InputError, NotBegun, TierError, nearest, short

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import Scenario

MORI = "KVCOVER_MORI"
"""Which `mori.io` a tier that takes one runs: stand-in, library or a version."""
TIERS = {
    "model": "kvcover.sim.simulate:model_tier",
    "connector": "kvcover.real_backend.tiers.connector:connector_tier",
    "hardware": "kvcover.real_backend.tiers.hardware:hardware_tier",
}


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier can do, as data.

    `faults` are the kinds of fault that it can inject. `features` are those of the swarm whose draws it can act on (None: all),
    `pins` the fields that whatever is drawn for it must have. `takes_vllm`: it runs the vLLM that `--vllm` names,
    `takes_mori`: the `mori.io` that `--mori` names.
    `virtual_time`: its runs have virtual times and a digest, and are the same each time. `policies`: it plays a release by its
    policies, of which any can be exchanged. `hardware`: it needs GPUs and their links to itself.
    """

    faults: frozenset[str]
    features: tuple[str, ...] | None = None
    pins: Mapping[str, Any] = {}
    takes_vllm: bool = False
    takes_mori: bool = False
    virtual_time: bool = False
    policies: bool = False
    hardware: bool = False


class Pace(NamedTuple):
    """How many runs go on: none begins after `until` (by `time.monotonic()`), and `done` is told of each as it ends, by position.

    A run that did not begin is NotBegun in the place of its result.
    """

    until: float = math.inf
    done: Callable[[int, Result | TierError], None] = lambda position, result: None

    def over(self) -> bool:
        """Whether nothing may begin any more."""
        return time.monotonic() >= self.until


NOT_BEGUN = NotBegun("--budget", "it ended before this run began", "give more seconds")


class Tier(ABC):
    """Somewhere to run scenarios. A tier never falls back to another: what it can't run raises TierError."""

    name: ClassVar[str]
    can: ClassVar[Capabilities]

    def run(self, scenario: Scenario, vllm: str | None = None) -> Result:
        """Run one scenario; `vllm` is what `--vllm` says. Raises InputError for one that makes no sense."""
        return self.many([scenario], [vllm])[0]

    @overload
    def many(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None] | None = None, *, keep_errors: Literal[False] = False
    ) -> list[Result]: ...

    @overload
    def many(
        self,
        scenarios: Sequence[Scenario],
        vllms: Sequence[str | None] | None = None,
        *,
        keep_errors: Literal[True],
        pace: Pace = ...,
    ) -> list[Result | TierError]: ...

    def many(
        self,
        scenarios: Sequence[Scenario],
        vllms: Sequence[str | None] | None = None,
        *,
        keep_errors: bool = False,
        pace: Pace | None = None,
    ) -> Sequence[Result | TierError]:
        """One result a scenario, in order; `vllms` has what `--vllm` says for each.

        Whatever can't be run is refused before anything starts. What goes wrong in a run then is raised, and ends the others;
        with `keep_errors` it takes the place of that run's result, and the others go on. `pace` is when to begin none any more,
        and who is told of each as it ends.
        """
        chosen = [None] * len(scenarios) if vllms is None else list(vllms)
        for scenario, vllm in zip(scenarios, chosen, strict=True):
            self.refuse_undeclared(scenario, vllm)
        return self._run_all(scenarios, chosen, keep_errors, pace or Pace())

    def check(self, scenario: Scenario, vllm: str | None = None) -> None:
        """Raise TierError if the scenario can't be run here, InputError if it makes no sense. Runs nothing."""
        self.refuse_undeclared(scenario, vllm)
        self._check(scenario, vllm)

    def fit(self, draft: dict[str, Any]) -> None:  # noqa: B027 - not abstract: most of what is drawn fits as it is
        """Round a drafted scenario, in place, to what this tier can do, as far as that leaves it the same kind of scenario."""

    def release_of(self, vllm: str) -> str | None:
        """The release that `--vllm` names here; None if nothing says which it is. Raises TierError if it is not there."""
        refuse_options(self, {"--vllm": vllm})
        return None

    def code_of(self, vllm: str) -> dict[str, str]:
        """SHA-256 of each file of the connector that `--vllm` names here, by side and file. Raises TierError if it is not there."""
        refuse_options(self, {"--vllm": vllm})
        return {}

    def refuse_undeclared(self, scenario: Scenario, vllm: str | None = None) -> None:
        """Raise TierError for a fault, InputError for a vLLM, that this tier does not declare. Looks at no machine."""
        refuse_options(self, {"--vllm": vllm})
        for index, kind in enumerate(fault_kinds(scenario)):
            if kind not in self.can.faults:
                problem = f"{kind} can't be injected on the {self.name} tier"
                raise TierError(f"faults[{index}]", problem, f"leave it out, or {_use(injecting(kind))}")

    @abstractmethod
    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> Sequence[Result | TierError]:
        """As `many`, of scenarios that ask for nothing undeclared."""

    @abstractmethod
    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        """As `check`, of a scenario that asks for nothing undeclared."""


def load_tier(name: str) -> Tier:
    """The tier of this name; raises TierError if there is none."""
    if name not in TIERS:
        raise TierError("--tier", f"no tier {name!r}", nearest(name, TIERS))
    module, _, attribute = TIERS[name].partition(":")
    tier = getattr(import_module(module), attribute)
    assert isinstance(tier, Tier)
    return tier


def fault_kinds(scenario: Scenario) -> list[str]:
    """The kind of each fault of a scenario, in order. Raises InputError for a scenario whose fields hold what they may not."""
    from kvcover.sim.scenario.scenario import checked, fault_of

    return [fault_of(f"faults[{index}]", given).kind for index, given in enumerate(checked(scenario).faults)]


def tiers_that(can: Callable[[Capabilities], bool]) -> list[str]:
    """Names of the tiers of whose capabilities this is true, in the order of the table."""
    return [name for name in TIERS if can(load_tier(name).can)]


def injecting(kind: str) -> list[str]:
    """Names of the tiers that can inject this kind of fault."""
    return tiers_that(lambda can: kind in can.faults)


# What an option of a command asks of the tier, and what a tier lacks that can't use it.
_OPTIONS: dict[str, tuple[Callable[[Capabilities], bool], str]] = {
    "--vllm": (lambda can: can.takes_vllm, "runs no vLLM"),
    "--mori": (lambda can: can.takes_mori, "runs no mori.io of yours"),
    "--causes": (lambda can: can.policies, "has no policies to flip; `kvcover why --causes` flips the model's"),
    "--verbose": (lambda can: can.takes_vllm, "looks into no connector"),
    "--shrink": (lambda can: can.virtual_time, "gives no two runs that are alike"),
    "--jobs": (lambda can: can.virtual_time, "spreads its runs itself"),
    "--dask": (lambda can: can.virtual_time, "spreads its runs itself"),
}


def refuse_options(tier: Tier, given: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that was given (its value is not None, nor False) and means nothing to the tier."""
    for option, value in given.items():
        needed, lacks = _OPTIONS[option]
        if value is not None and value is not False and not needed(tier.can):
            what = "" if value is True else f"{short(value)}: "
            raise InputError(option, f"{what}the {tier.name} tier {lacks}", f"leave it out, or {_use(tiers_that(needed))}")


def _use(names: Sequence[str]) -> str:
    return f"use --tier {' or '.join(names)}"
