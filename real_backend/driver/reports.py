"""What the processes of a run report: plain data, no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Coverage:
    """Fractions of one rank's cells: right, wrong, never written; sum 1. `stray` counts cells outside the request."""

    covered: float
    wrong: float
    missing: float
    stray: int = 0

    @classmethod
    def over(cls, parts: Sequence[tuple[int, Coverage]]) -> Coverage:
        """Return the coverage of several parts, each with its number of cells."""
        if len(parts) == 1:
            return parts[0][1]
        total = max(1, sum(cells for cells, _ in parts))

        def share(name: str) -> float:
            found: int = sum(round(getattr(part, name) * cells) for cells, part in parts)
            return found / total

        return cls(share("covered"), share("wrong"), share("missing"), sum(part.stray for _, part in parts))


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that left a call on the connector, or ended one of its threads.

    `misfit` is the harness's own line that failed, if no line of the connector was running: then it can't drive this vLLM.
    `broken` is the error, by itself or as the cause of this one, that says the code or the machine is broken: it is no fault
    of the protocol.
    """

    rank: str
    call: str
    kind: str
    text: str
    misfit: str = ""
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Forward:
    """The part of a step that is a forward pass: requests whose prompt is computed, or whose loaded cells are used.

    `fill` says how many tokens of each prompt are computed: a recurrent state is one of so many tokens.
    """

    fill: Mapping[int, int] = field(default_factory=dict)
    use: tuple[int, ...] = ()


@dataclass(slots=True)
class StepReport:
    """What a worker returns from a step. Request ids are the engine's; `raised` is set if the step died."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    raised: Raised | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker saw. `notices` are the control messages that its notify listener took in, in order.

    `wrote_to` maps a peer's engine key to the ranges (address there, bytes) that were written without an error,
    `read_from` to the number of bytes that were read, in so many `reads`.
    """

    name: str
    notices: tuple[dict[str, Any], ...] = ()
    wrote_to: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    read_from: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    failed_batches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bound: tuple[int, ...] = ()
    dialled: tuple[int, ...] = ()
    last_step: str = ""
    """What it did last, or where it stands if it never came back."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request ended. Coverage is by decode TP rank of the request's DP rank."""

    at_go: tuple[Coverage, ...] | None
    at_end: tuple[Coverage, ...]
    outcome: str
    go: bool = False
    failed: bool = False
    recomputed: bool = False
    told: tuple[str, ...] = ()
    prefill_told: tuple[str, ...] = ()
    prefill_released: tuple[str, ...] = ()
    released_late: bool = False
    """A timer fired: a prefill rank gave its blocks back without a message, or its forward waited for a peer in vain."""
    ended: bool = False
    held: bool = False
    """An engine still holds the request's blocks at the end."""

    @property
    def coverage(self) -> tuple[Coverage, ...]:
        """At go, or at the end when the request never went."""
        return self.at_go if self.at_go is not None else self.at_end


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One run: every request, every rank, every exception."""

    requests: tuple[RequestResult, ...]
    ranks: tuple[RankReport, ...]
    raised: tuple[Raised, ...]
    stalled: tuple[str, ...]
    """Ranks that never came back from a step."""
    outcome: str
    seconds: float
    fired: tuple[int, ...] = ()
    """How often each planned fault changed something."""
    stray: int | None = None
