"""Both engines as processes: which ports their ranks bind, which engines start, and one that comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcover.sim.kernel.events import Raised
from kvcover.sim.moriio.decode import DecodeEngine
from kvcover.sim.moriio.engine import Engine
from kvcover.sim.moriio.prefill import PrefillEngine
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.scenario.context import Context


class Deployment:
    """Every DP rank of both sides. `refuses` says why a correct connector refuses the pair, empty if it does not."""

    def __init__(self, context: Context, refuses: Callable[[], str]) -> None:
        self.context = context
        self._refuses = refuses
        self.prefills = [PrefillEngine(context, dp, refuses) for dp in range(context.setup.prefill.all_dp)]
        self.decodes = [DecodeEngine(context, dp, refuses) for dp in range(context.setup.decode.all_dp)]

    @property
    def engines(self) -> list[Engine]:
        """Prefill's, then decode's."""
        return [*self.prefills, *self.decodes]

    def side(self, name: str) -> Sequence[Engine]:
        """All engines of "prefill" or "decode", by DP rank."""
        return self.prefills if name == "prefill" else self.decodes

    def listeners(self) -> Iterator[tuple[Engine, Rank]]:
        """Ranks in the order in which they bind their ports; every pipeline stage on a host binds those of its rank."""
        for engine in self.engines:
            for rank in [*engine.ranks] * engine.me.stages:
                yield engine, rank

    def bind(self, engine: Engine, rank: Rank) -> None:
        """Bind a rank's two ports; a rank whose handshake port is taken never becomes ready, nor does its engine."""
        me = engine.me
        dp = engine.dp % me.local_dp if me.release.pod_ports == "in_pod" else me.own_dp(engine.dp)
        port = me.release.call("ports")(dp, rank.tp, me.tp)
        host = me.hosts[me.pod(engine.dp)]
        if not self.context.network.bind((host, me.handshake_port + port), rank):
            # It waits for its listener for ever, and the other DP ranks of its instance wait for it.
            for other in self.prefills if engine in self.prefills else self.decodes:
                if me.instance(other.dp) == me.instance(engine.dp):
                    other.started = False
        self.context.network.bind((host, me.notify_port + port), rank)

    def all_start(self) -> bool:
        """Whether every engine's connector takes its cache; one that does not start is known to no router."""
        refused = [(engine, why) for engine in self.engines if (why := engine.me.start_error(self.context.mode))]
        for engine, why in refused:
            engine.crash(Raised.by(why), None)
        return not refused

    def restart(self, before: Engine) -> None:
        """The engine is back: ports and names as before, and nothing in its memory."""
        engine: Engine
        if isinstance(before, PrefillEngine):
            engine = self.prefills[before.dp] = PrefillEngine(self.context, before.dp, self._refuses)
        else:
            engine = self.decodes[before.dp] = DecodeEngine(self.context, before.dp, self._refuses)
        self.context.log("restarted", engine.name)
        for rank in engine.ranks:
            self.bind(engine, rank)
