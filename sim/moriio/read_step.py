"""The engine step in which a READ request runs at decode: handshakes, reads, what it waits for, the forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.kernel.events import Raised, Stall
from kvcover.sim.moriio.decode_rank import DecodeRank
from kvcover.sim.moriio.legs import Leg, is_no_key
from kvcover.sim.moriio.reader import Landing, Source
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.endpoint import Endpoint


class LazyReads:
    """READ with lazy handshakes: when a step of the engine began to dial and how long it waits (ns), and the reads it put off."""

    def __init__(self) -> None:
        self.dialling = (-1, 0)
        self.put_off: deque[tuple[ReadStep, Leg, list[list[int]]]] = deque()


class Scheduler(Protocol):
    """What a step asks of the decode engine whose request it runs."""

    context: Context
    me: Endpoint
    name: str
    ranks: list[DecodeRank]
    lazy: LazyReads
    crashed: bool

    def note_go(self, transfer: Transfer) -> None:
        """From here on the request uses its cells."""

    def compute_locally(self, transfer: Transfer) -> None:
        """Decode prefills by itself."""

    def end(self, transfer: Transfer) -> None:
        """The request has its tokens."""

    def fail(self, transfer: Transfer, why: str) -> None:
        """The request does not get its KV."""

    def crash(self, raised: Raised, transfer: Transfer | None, where: str = "") -> None:
        """The engine is lost."""


class ReadStep:
    """One step of one request on all ranks of a decode engine. `run` is a SimPy process."""

    def __init__(self, engine: Scheduler, transfer: Transfer) -> None:
        self.engine = engine
        self.transfer = transfer
        self.context = engine.context
        self.me = engine.me
        self._dials = self._put_off = False  # the step has handshakes, and reads for this request, or for another one

    def run(self, leg: Leg | None, local: list[list[int]]) -> Generator[Any, None, None]:
        """The engine step in which the request runs: handshakes, reads, barrier, forward. `local` are its block tables."""
        dials = leg is not None and (any(local) or not self._releases_without_session())
        if leg is not None and dials and not (yield from self._handshake(leg, local)):
            self.engine.fail(self.transfer, "a handshake with prefill was not answered within the transfer timeout")
            return
        landings = {} if self._put_off else self._post(leg, local)
        if leg is not None and not (self._dials or self._put_off):
            self._post_put_off()
        if self.transfer.request.external_zero:
            self.engine.compute_locally(self.transfer)
            return
        if any(landing.error for landing in landings.values()) and self.me.release.read_failure == "load_errors":
            last = max(ns for landing in landings.values() for ns in landing.done_ns if ns < NEVER)
            yield self.context.clock.timeout(max(last + 1 - self.context.clock.now, 1))
            if all(max(landing.done_ns) < NEVER for landing in landings.values()):
                self._settled(-1)
            if self.context.geometry.has_states and self.me.release.failed_states == "raises":
                raise PeerRefusal("TransferError", "a read failed in a model with recurrent states", "failed_states")
            if len(self.me.tables) > 1 and self.me.release.failed_blocks == "one_table":
                text = "a read failed: the scheduler takes failed blocks of one block table only"
                raise PeerRefusal("RuntimeError", text, "failed_blocks")
            self.engine.fail(self.transfer, "reads failed")
            return
        yield from self._use(landings)

    def _post(self, leg: Leg | None, local: list[list[int]]) -> dict[int, Landing]:
        """Post the reads of all ranks; raises what the connector raises. None for a rank that has nothing to read."""
        landings: dict[int, Landing] = {}
        lazy = self.me.release.read_handshake == "lazy" and (any(local) or not self._releases_without_session())
        for rank in self.engine.ranks:
            if leg is None or (lazy and not rank.reader.agents):
                continue  # or it warned that no session is there and goes on without data
            sources, tps = self._plan(rank, leg, local)
            landing = landings[rank.tp] = rank.reader.post(sources, self.transfer)
            if landing.refusal is None and not self._dies_early(landing):
                self._close_read(rank, leg, tps, landing)
        for landing in landings.values():
            if landing.refusal is not None:
                raise landing.refusal
        return landings

    def _post_put_off(self) -> None:
        """A step that reads also reads for one request whose turn did not come in its own step: too late for its forward."""
        if self.engine.lazy.put_off:
            step, leg, local = self.engine.lazy.put_off.popleft()
            step._post(leg, local)

    def _plan(self, rank: DecodeRank, leg: Leg, local: list[list[int]]) -> tuple[list[Source], list[int]]:
        """What a rank reads, and the prefill ranks whose blocks it releases then."""
        if not any(local) and self._releases_without_session():
            return [], [target.tp_rank for target in rank.reader.targets(leg)]
        sources = rank.reader.plan(leg, self.transfer, local)
        if self.me.release.read_pairing == "remote_tail_as_local":  # may name blocks of others
            self.transfer.own_blocks_only &= all(self._hits_own_blocks(source, local[0]) for source in sources)
        return sources, [source.tp for source in sources]

    def _hits_own_blocks(self, source: Source, own: list[int]) -> bool:
        for group, (copy, _) in zip(self.me.groups, source.batches, strict=False):
            if copy is not None and not copy.by_unit:
                cells = copy.where // group.shape.heads % group.shape.num_blocks
                if not set(np.unique(cells).tolist()) <= set(own):
                    return False
        return True

    def _releases_without_session(self) -> bool:
        """Whether a read of nothing is only a release; else it is an empty batch, which needs a session."""
        return self.me.release.empty_read == "release"

    def _share_the_wait(self, leg: Leg, local: list[list[int]], wait: int) -> int:
        """Lazy handshakes: in some releases a step that dials reads for its first request alone. Returns how long it waits."""
        now, engine = self.context.clock.now, self.engine
        if wait:
            self._dials, engine.lazy.dialling = True, (now, wait)
        elif engine.lazy.dialling[0] == now and self.me.release.read_queue == "one_a_step":
            self._put_off = True
            self.context.log("put_off", engine.name, request=self.transfer.index)
            engine.lazy.put_off.append((self, leg, local))
            wait = engine.lazy.dialling[1] + 1  # the reads of the step are posted before, and may end it
        return wait

    def _handshake(self, leg: Leg, local: list[list[int]]) -> Generator[Any, None, bool]:
        """Every rank handshakes with its peers; eager kinds vote, and wait for a port that nobody bound. False: in vain."""
        clock, eager = self.context.clock, self.me.release.read_handshake != "lazy"
        dials, dead = 0, False
        for rank in self.engine.ranks:
            reader, known = rank.reader, len(rank.reader.agents)
            try:
                keys = reader.keys(leg)
            except PeerRefusal as refusal:
                raise PeerRefusal("HandshakeError" if eager else "KeyError", f"no session to prefill: {refusal.text}") from None
            while not reader.dial(leg, keys):
                if not eager:
                    dead = True
                    break
                if not (yield from self._wait_for_port(rank)):
                    return False
                keys = reader.keys(leg)
            dials = max(dials, len(reader.agents) - known)
        wait = self.context.setup.transfer_timeout_ns if dead else dials * self.context.timing.handshake_ns
        if not eager and not dead:
            wait = self._share_the_wait(leg, local, wait)
        if wait:
            yield clock.timeout(wait)
        return True

    def _wait_for_port(self, rank: DecodeRank) -> Generator[Any, None, bool]:
        """The step stands still until somebody binds the port, or patience ends: ours (False), or the executor's (it raises)."""
        clock, bound = self.context.clock, self.context.clock.event()
        assert rank.reader.dead is not None
        self.context.log("stalled", rank.name, fields=Stall(None))

        def was_bound() -> None:
            bound.succeed()

        self.context.network.when_bound(rank.reader.dead, was_bound)
        limit_s = self.me.side.executor_timeout_s
        if self.me.release.read_handshake == "eager_bounded":
            yield bound | clock.timeout(self.context.setup.transfer_timeout_ns)
        elif limit_s is None:
            yield bound
        else:
            yield bound | clock.timeout(round(limit_s * 1e9))
            if not bound.triggered:
                raise PeerRefusal("TimeoutError", f"the executor waited {limit_s:g} s for a step")
        return bool(bound.triggered)

    def _close_read(self, rank: DecodeRank, leg: Leg, tps: list[int], landing: Landing) -> None:
        """When the read counts as done: note it and release prefill's blocks. A refused read releases as well."""
        clock, release = self.context.clock, self.me.release
        at = landing.done_ns[-1] if release.read_done == "last_layer" else max(landing.done_ns)
        limited = release.recv_abort == "silent" and at - clock.now > self.context.setup.recv_abort_timeout_ns
        if at >= NEVER or limited:
            return  # never over, or dropped at the receive limit: prefill is told nothing

        def close(_event: Any) -> None:
            if self.engine.crashed:
                return
            if is_no_key(leg.transfer_id):  # reads are counted by it
                self.engine.crash(Raised("TypeError", "unhashable transfer id"), self.transfer, rank.name)
                return
            # The first failed status among those that are looked at ends the look.
            layer = len(landing.done_ns) - 1 if release.read_done == "last_layer" else -1
            if layer not in landing.failed if layer >= 0 else not landing.error:
                self.context.log("settled", rank.name, request=self.transfer.index, layer=layer)
            if not landing.error:
                self.context.log("told", rank.name, request=self.transfer.index)
            try:
                rank.reader.send_release(leg, tps, self.transfer)
            except PeerRefusal as refusal:
                self.engine.crash(Raised.by(refusal), self.transfer, rank.name)

        clock.after(at - clock.now, close)

    def _dies_early(self, landing: Landing) -> bool:
        """Whether the engine dies of failed reads before it releases anything, as it waits for them before the forward.

        With recurrent states it waits for theirs, in 0.33.0 for all (measured, 0.31.0-0.33.0).
        """
        geometry, release = self.context.geometry, self.me.release
        raises = release.failed_states == "raises" and release.read_failure == "load_errors"
        if not landing.error or not geometry.has_states or not raises:
            return False
        return self._barrier() == "step" or any(geometry.at(layer).state for layer in landing.failed)

    def _use(self, landings: dict[int, Landing]) -> Generator[Any, None, None]:
        """Run the forward; what each layer holds when it is used depends on the barrier."""
        clock, layers, layer_ns = self.context.clock, self.context.geometry.layers, self.context.timing.decode_layer_ns
        barrier = self._barrier()
        if barrier.startswith("step") and not (yield from self._await_all(landings)):
            self.engine.fail(self.transfer, "reads still in flight at the transfer timeout")
            return
        if self.engine.crashed:
            return
        self.engine.note_go(self.transfer)
        for layer in range(layers):
            if barrier == "per_layer":
                land = max((landing.done_ns[layer] for landing in landings.values()), default=clock.now)
                if land >= clock.now:
                    yield clock.timeout(min(land + 1 - clock.now, self.context.setup.transfer_timeout_ns))
                if landings and land < clock.now:
                    self._settled(layer)
            for rank in self.engine.ranks:
                rank.look(self.transfer, layer)
            yield clock.timeout(layer_ns)
        self.engine.end(self.transfer)

    def _barrier(self) -> str:
        """What the release's barrier comes to under this engine's CUDA graphs."""
        policy, full = self.me.release.read_barrier, self.me.side.cuda_graphs == "full"
        if policy == "per_layer" and full:
            return "none"
        if policy == "per_layer_or_step":
            return "step" if full else "per_layer"
        return policy

    def _await_all(self, landings: dict[int, Landing]) -> Generator[Any, None, bool]:
        """Wait for every read of the step; False if the request fails because one takes too long."""
        clock = self.context.clock
        last = max((max(landing.done_ns) for landing in landings.values()), default=clock.now)
        wait = last + 1 - clock.now
        if wait > self.context.setup.transfer_timeout_ns:
            yield clock.timeout(self.context.setup.transfer_timeout_ns)
            if self.me.release.read_barrier == "step":
                raise PeerRefusal("TransferError", "reads still in flight at the transfer timeout", "read_barrier")
            return self.me.release.read_barrier != "step_or_fail"
        yield clock.timeout(wait)
        if landings:
            self._settled(-1)
        return True

    def _settled(self, layer: int) -> None:
        """The forward waited until the reads of the layer (-1: of all) were over."""
        self.context.log("settled", self.engine.name, request=self.transfer.index, layer=layer)
