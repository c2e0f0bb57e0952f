"""What the engines of both sides have in common: one DP rank's scheduler, from its ranks' start to the end of its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import Raised, Why
from kvcover.sim.moriio.announce import Announcer
from kvcover.sim.moriio.effects import ScheduleFaults
from kvcover.sim.moriio.legs import Leg, address_in_id, mapped_id_of, read_leg, transfer_id_of
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.transfer import BlockPool, Transfer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.endpoint import Endpoint, Request


class Engine:
    """Scheduler and executor of DP rank `dp` of `me`.

    `fixed` are blocks that requests ask for by number. `refuses` says why a correct connector refuses this pair of engines,
    empty if it does not.
    """

    ranks: Sequence[Rank]

    def __init__(self, context: Context, me: Endpoint, dp: int, fixed: set[int], refuses: Callable[[], str]) -> None:
        self.context = context
        self.me = me
        self.dp = dp
        self.name = me.engine_name(dp)
        self.pool = BlockPool(me.shape.num_blocks, fixed)
        self.announce = Announcer(context, me, dp, self.name)
        self.faults = ScheduleFaults(context)
        self.refuses = refuses
        self.crashed = False
        self.started = True
        self._early: list[tuple[Transfer, Params, Any]] = []  # legs that came before all ranks were there

    def start(self) -> None:
        """All ranks are there: take what has come so far."""
        self.started = True
        early, self._early = self._early, []
        for leg in early:
            self.submit(*leg)

    def submit(self, transfer: Transfer, params: Params, answer: Any) -> None:
        """A leg arrived at the scheduler; `answer` is the event that the router waits for, if it waits."""
        if self.started:
            self.take(transfer, params, answer)
        else:
            self._early.append((transfer, params, answer))

    def take(self, transfer: Transfer, params: Params, answer: Any) -> None:
        """Begin with a request; all ranks are there."""
        raise NotImplementedError

    def transfer_id(self, transfer: Transfer, params: Params) -> Any:
        """The transfer id that the scheduler finds in a leg. Raises PeerRefusal where it raises."""
        return transfer_id_of(params, self.me.release.transfer_id_missing, self._request_id(transfer))

    def mapped_id(self, transfer: Transfer, params: Params) -> Any:
        """The id under which the scheduler maps a request. Raises PeerRefusal where it raises."""
        return mapped_id_of(params, self.me.release.transfer_id_missing, self._request_id(transfer))

    def read_leg(self, transfer: Transfer, params: Params, peer: Endpoint) -> Leg:
        """A whole leg that names `peer`. Raises PeerRefusal where the scheduler raises."""
        return read_leg(params, self.me, peer, self._request_id(transfer), address_in_id(self.context.setup, transfer, peer))

    def _request_id(self, transfer: Transfer) -> str:
        return f"{self.me.letter}-{transfer.index}"

    def block_count(self, request: Request) -> int:
        """Blocks that the engine allocates for a request: its prompt and the engine's lookahead, in all block tables."""
        return sum(count - skipped for skipped, count in self.me.rows(request.prompt_tokens))

    def refuse(self, transfer: Transfer, why: str) -> None:
        """The engine refuses the request before anything moves, and the client hears of it."""
        transfer.bad_end = "refused"
        transfer.finish()
        self.context.log("refused", self.name, request=transfer.index, fields=Why(why))

    def refuse_or_crash(self, transfer: Transfer, refusal: PeerRefusal) -> None:
        """The connector raised over a request: a correct one answers the client and goes on, others take the engine along."""
        if self.me.release.leg_error == "request_refused":
            self.refuse(transfer, refusal.text)
        else:
            self.crash(Raised.by(refusal), transfer)

    def crash(self, raised: Raised, transfer: Transfer | None, where: str = "") -> None:
        """The engine, or its step, is lost, and with it every request in it."""
        if not self.crashed:
            self.crashed = True
            self.context.log("crashed", where or self.name, request=transfer.index if transfer else -1, fields=raised)

    @property
    def gone(self) -> bool:
        """Whether its processes have ended."""
        return any(rank.gone for rank in self.ranks)

    def die(self) -> list[int]:
        """All processes of the engine end. Returns the requests that were in it."""
        for rank in self.ranks:
            rank.die()
        inside = [*self.pool.held, *self.not_admitted(), *(transfer.index for transfer, _, _ in self._early)]
        self.pool.held.clear()
        return inside

    def not_admitted(self) -> Iterable[int]:
        """Requests that the scheduler has and that hold no blocks yet."""
        raise NotImplementedError

    def cut_off(self, transfer: Transfer) -> bool:
        """The engine died with the request in it. Returns whether the client hears of that from the router."""
        raise NotImplementedError
