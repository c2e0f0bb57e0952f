"""What a finished run left behind, on any tier: the one thing that outcome, checkers, findings and stories look at."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.cache.ledger import Count
from kvcover.sim.cache.wrong import WrongCells
from kvcover.sim.kernel.history import History
from kvcover.sim.scenario.endpoint import Endpoint, Request
from kvcover.sim.scenario.setup import Setup


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request.

    `prefill_dp` and `decode_dp` are where its legs really went. `at_go` counts the cells of each TP rank of that decode DP
    rank when decode used them (None: it never did), `at_end` when the run was over; `by_layer` counts what `cells` does, layer by
    layer (None: not known). `bad_end` is refused, failed, recomputed
    or crash. `lost` says that an engine which had it died, `held` that one still has blocks for it, `late` that blocks or a
    step waited until a timer fired. Times are in ns, -1 where there was none or the tier does not know.
    """

    request: Request
    prefill_dp: int
    decode_dp: int
    at_go: tuple[Count, ...] | None
    at_end: tuple[Count, ...]
    by_layer: tuple[list[Count], ...] | None = None
    bad_end: str = ""
    admitted: bool = True
    ended: bool = True
    lost: bool = False
    held: bool = False
    late: bool = False
    aborted: bool = False
    preempted: bool = False
    started_ns: int = -1
    posted_ns: int = -1
    landed_ns: int = -1
    go_ns: int = -1

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def cells(self) -> tuple[Count, ...]:
        """By TP rank: at go, or at the end if it never went."""
        return self.at_end if self.at_go is None else self.at_go


class EngineEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank of an engine when the run was over; `held` are the requests that it still has blocks for."""

    name: str
    me: Endpoint
    dp: int
    started: bool
    crashed: bool
    held: tuple[int, ...]


class KeyRead(msgspec.Struct, frozen=True):
    """One line of the connector that read a key of its leg: how ([], get, in, pop, items, …), and what it took if it was absent.

    `default` is as `repr` writes it; empty if there was none, and then an absent key was an error, or only looked for.
    """

    key: str
    file: str
    line: int
    function: str
    code: str
    how: str
    absent: bool
    default: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class LegReads(msgspec.Struct, frozen=True):
    """All reads of one leg, in order. `copied` are places that made copies of it which may have been read unseen."""

    reads: tuple[KeyRead, ...] = ()
    copied: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run. `legs` are the params as they left the router, by request and side; `fired` counts by planned fault.

    `reads` says of a leg what the connector read of it, where that was seen. `wrong` tells of wrong cells, by rank.
    `observed` are the kinds of event that the tier sees if they happen, and `landing` if it knows when bytes arrive; None: all.
    `stray` counts cells of others that changed, None if nobody looked.
    """

    tier: str
    setup: Setup
    history: History
    courses: tuple[Course, ...]
    engines: tuple[EngineEnd, ...]
    legs: dict[tuple[int, str], dict[str, Any]]
    fired: tuple[int, ...]
    stray: int | None
    observed: frozenset[str] | None = None
    reads: dict[tuple[int, str], LegReads] = {}
    wrong: tuple[WrongCells, ...] = ()

    def sees(self, kind: str) -> bool:
        """Whether there would be an event of this kind if it had happened."""
        return self.observed is None or kind in self.observed

    @property
    def mode(self) -> str:
        return self.setup.scenario.mode

    @property
    def geometry(self) -> Geometry:
        return self.setup.geometry

    def leg(self, side: str, request: int = 0) -> dict[str, Any]:
        """The params that left for the prefill or the decode side; empty if they never did."""
        return self.legs.get((max(request, 0), side), {})

    def side(self, letter: str) -> list[EngineEnd]:
        """The DP ranks of prefill (P) or of decode (D)."""
        return [engine for engine in self.engines if engine.me.letter == letter]

    def ranks(self) -> dict[str, tuple[EngineEnd, int]]:
        """Every rank's engine and TP rank, by its name."""
        return {engine.me.rank_name(engine.dp, tp): (engine, tp) for engine in self.engines for tp in range(engine.me.tp)}
