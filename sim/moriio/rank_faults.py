"""What planned faults do to ranks: one comes late, is slow, stands still, dies, or dies and comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvcover.faults import EventFault
from kvcover.sim.kernel.clock import ns
from kvcover.sim.kernel.events import Lost, Raised
from kvcover.sim.moriio.deployment import Deployment
from kvcover.sim.moriio.engine import Engine
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context


class RankFaults:
    """The faults of a deployment's ranks. `lose(transfer, why)` tells the client of a request that died with its engine."""

    def __init__(
        self, context: Context, deployment: Deployment, transfers: Sequence[Transfer], lose: Callable[[Transfer, Lost], None]
    ) -> None:
        self.context = context
        self._deployment = deployment
        self._transfers = transfers
        self._lose = lose
        self._late: Counter[str] = Counter()  # late ranks that are yet to bind their ports, by engine

    def start(self) -> None:
        """All ranks bind their ports, but for those that come late; what is to happen to ranks later is set up."""
        late = {fault.target: fault for fault in self.context.injector.planned("late-rank")}
        for engine, rank in self._deployment.listeners():
            if (fault := late.get(rank.name)) is None:
                self._deployment.bind(engine, rank)
            else:
                self.context.injector.note(fault)
                engine.started = False
                self._late[engine.name] += 1
                self.context.clock.after(ns(fault.ms), lambda _event, e=engine, r=rank: self._come_late(e, r))  # type: ignore[misc]
        self._plan()

    def _come_late(self, engine: Engine, rank: Rank) -> None:
        """The engine starts with the last of its late ranks, if no rank of the deployment found its port taken."""
        self._deployment.bind(engine, rank)
        self._late[engine.name] -= 1
        failed = any(event.actor.startswith(engine.me.letter) for event in self.context.history.events("bind_failed"))
        if not self._late[engine.name] and not failed:
            engine.start()

    def _plan(self) -> None:
        """Slow NICs from the start; stalls, crashes and restarts at their time."""
        clock, injector = self.context.clock, self.context.injector
        ranks = {rank.name: rank for engine in self._deployment.engines for rank in engine.ranks}
        for fault in injector.planned("slow-nic"):
            ranks[fault.target].nic.slowdown = fault.factor or 1.0
            injector.note(fault)
        for fault in injector.planned("stall-rank"):
            start = ns(fault.ms)
            ranks[fault.target].stalls.append((start, start + ns(fault.for_ms)))
            clock.after(start, lambda _event, f=fault: None if self._over() else injector.note(f))  # type: ignore[misc]
        for fault in (*injector.planned("crash-rank"), *injector.planned("restart-rank")):
            clock.after(ns(fault.ms), lambda _event, f=fault: self._crash(f))  # type: ignore[misc]

    def _over(self) -> bool:
        """Whether every request has ended and nobody holds blocks for one: then a rank's fault does nothing more."""
        held = any(engine.pool.held for engine in self._deployment.engines)
        return not held and all(transfer.ended for transfer in self._transfers)

    def _crash(self, fault: EventFault) -> None:
        """A rank's process dies, and its engine with it; for some faults it comes back."""
        engine, rank = next(
            (engine, rank) for engine in self._deployment.engines for rank in engine.ranks if rank.name == fault.target
        )
        if self._over() or engine.crashed:
            return
        self.context.injector.note(fault)
        rank.deaf = True
        engine.crash(Raised("", f"rank {rank.name} died", fault=str(fault)), None, rank.name)
        if fault.kind == "restart-rank":
            for index in engine.die():
                if engine.cut_off(self._transfers[index]):
                    self._lose(self._transfers[index], Lost("died", f"{engine.name} died with it"))
            for other in engine.ranks:
                self.context.network.free(other)
            self.context.clock.after(ns(fault.for_ms), lambda _event: self._deployment.restart(engine))
