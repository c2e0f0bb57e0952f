"""A scenario made ready for the real connector: plain data, no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvcover.faults import KINDS, EventFault, Fault, Injector
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.endpoint import Endpoint
from kvcover.sim.scenario.scenario import Scenario, Timers
from kvcover.sim.scenario.setup import Setup, resolve

Role = Literal["prefill", "decode"]
"""Which of the two engines."""
ROLES: tuple[Role, Role] = ("prefill", "decode")
EngineKey = tuple[Role, int]
"""One DP rank of one engine."""
BlockTables = tuple[tuple[int, ...], ...]
"""A request's blocks by block table; 0 is vLLM's null block, for what has left a window."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The connector's own timers in a run, in seconds, small so that a hang is decided soon."""

    transfer_s: float
    defer_s: float
    read_abort_s: float = 2.0

    @classmethod
    def of(cls, setup: Setup, load: int = 0) -> Limits:
        """Limits in which a healthy handshake fits even when all ranks share two cores; `load`: with those of other runs."""
        ranks = max(load, len(setup.prefill.rank_names()) + len(setup.decode.rank_names()))
        return cls(1.0 + 0.08 * ranks, 1.5 + 0.08 * ranks).unless(setup.scenario.timers)

    def unless(self, given: Timers) -> Limits:
        """Those that a scenario sets are kept; vLLM's defaults are too long to wait for, so these stand in for them."""
        usual = Timers()

        def pick(name: str, own: float) -> float:
            asked: float = getattr(given, name)
            return own if asked == getattr(usual, name) else asked

        return Limits(
            pick("transfer_timeout_s", self.transfer_s),
            pick("defer_timeout_s", self.defer_s),
            pick("recv_abort_timeout_s", self.read_abort_s),
        )


@dataclass(frozen=True, slots=True)
class RouterLegs:
    """Both legs of a request as they leave the router; in READ decode's is made of prefill's response."""

    prefill: Params
    changed: list[Fault]
    """The faults that changed it."""
    decode: Callable[[Mapping[str, Any]], tuple[Params, list[Fault]]]
    """The same of decode's, from prefill's response."""
    ports_off: Mapping[str, int]
    """By how much the ports of an engine are off in the request's id."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of two real engines: what the model runs too, and what only a real run needs.

    `legs` and `keys`, which counts the faults of the router's keys and of
    what it knows, stay where the router is. `completion_delay_s` is the time from the post of a transfer to its bytes and
    completion (0: both happen inside the post), `book` the file in which all processes count what planned faults did.
    """

    setup: Setup
    limits: Limits
    legs: tuple[RouterLegs, ...] = ()
    keys: Injector = field(default_factory=lambda: Injector(()))
    completion_delay_s: float = 0.0
    book: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Faults tell a default by its identity, which a pickle loses, so they travel as people write them: in the scenario.
        return _for_ranks, (self.setup.scenario, self.limits, self.completion_delay_s, self.book)

    def endpoint(self, role: Role) -> Endpoint:
        """Return one of the two engines."""
        return self.setup.prefill if role == "prefill" else self.setup.decode

    def as_timed(self) -> Setup:
        """What is run, with the timers of this run."""
        return msgspec.structs.replace(
            self.setup,
            transfer_timeout_ns=round(self.limits.transfer_s * 1e9),
            defer_timeout_ns=round(self.limits.defer_s * 1e9),
            recv_abort_timeout_ns=round(self.limits.read_abort_s * 1e9),
        )

    @property
    def ranks(self) -> int:
        """Worker processes of both engines."""
        return sum(self.endpoint(role).tp * self.endpoint(role).dp for role in ROLES)

    @property
    def events(self) -> tuple[EventFault, ...]:
        """Faults that act while the run goes on; the others act on what the router writes."""
        faults = self.setup.faults
        return tuple(fault for fault in faults if isinstance(fault, EventFault) and KINDS[fault.kind].point != "registration")

    @property
    def alike(self) -> bool:
        """Whether all layers are alike, and attend to all tokens."""
        return not self.setup.geometry.window and self.setup.geometry.minor is None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(request.prompt_tokens for request in self.setup.requests)

    def kv_dtype(self, role: Role) -> str:
        """The type of a cache's values. Of equal types nothing depends, and cells are tagged in 4 bytes: only unequal ones show."""
        own = self.endpoint(role).shape.kv_dtype
        return "fp32" if all(self.endpoint(each).shape.kv_dtype == own for each in ROLES) else own


def _for_ranks(scenario: Scenario, limits: Limits, delay_s: float, book: Path) -> Trial:
    return Trial(resolve(scenario), limits, completion_delay_s=delay_s, book=book)
