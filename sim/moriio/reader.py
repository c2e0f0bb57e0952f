"""What one decode rank does in READ mode: handshakes, sources, guards, pairing, the reads and the releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcover.sim.cache.batch import Batch, Slice, head_slices, whole_blocks
from kvcover.sim.cache.geometry import CacheShape, Geometry, check_slices
from kvcover.sim.cache.layers import Group
from kvcover.sim.cache.ledger import Copy, SourceCache
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.clock import NEVER
from kvcover.sim.kernel.events import Dial, Failed, Sent
from kvcover.sim.moriio.effects import broken_session, transfer_effect
from kvcover.sim.moriio.legs import Leg
from kvcover.sim.moriio.prefill import PrefillRank
from kvcover.sim.moriio.rank import AgentKey, Rank
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.maps import MOST_HEADS, MOST_RANKS, Target
from kvcover.sim.releases.sizes import as_int

Pairs = list[tuple[int, int]]  # (our block, prefill's block)


class Source(NamedTuple):
    """One prefill rank that a decode rank reads, and the batch of every layer of each group; no batches: nothing is read.

    The connector goes layer by layer: it reads those before layer `refused_at`, and raises `refusal` there.
    """

    tp: int
    rank: PrefillRank
    batches: list[Batch]
    again: Callable[[], list[Batch]] | None = None  # the batches as they would be read now
    refused_at: int = NEVER
    refusal: PeerRefusal | None = None


class Landing(NamedTuple):
    """When the reads of one request are over at one rank: `done_ns[layer]` (NEVER: not at all), and which layers failed.

    `refusal` is what the connector raised after it had posted some.
    """

    done_ns: list[int]
    error: str
    refusal: PeerRefusal | None = None
    failed: frozenset[int] = frozenset()


class Reader:
    """The read side of one decode rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.context = rank.context
        self.me = rank.me
        self.name = rank.name
        self.agents: dict[tuple[int, AgentKey], Any] = {}  # by instance of prefill
        self.dead: tuple[str, int] | None = None
        self._reads_started = rank.me.own_dp(rank.dp)  # the round of flexible reads starts at the DP rank
        rdma = self.context.setup.scenario.rdma
        self._sq_depth = rdma.sq_depth * rdma.queue_pairs
        self._faulted = self.context.injector.plans("transfer")

    # -- handshake --------------------------------------------------------------------------------------------

    def keys(self, leg: Leg) -> Iterator[AgentKey]:
        """The (DP, TP) ranks of prefill that this rank handshakes with; TP None is the one that the map names."""
        if self._flexible(leg):
            return ((0, tp) for tp in range(min(as_int(leg.peer_tp), MOST_RANKS)))
        targets = self.targets(leg)
        tps = [target.tp_rank for target in targets] if len(targets) > 1 else [None]
        return ((dp, tp) for dp in range(min(as_int(leg.dp_size), MOST_RANKS)) for tp in tps)

    def dial(self, leg: Leg, keys: Iterator[AgentKey]) -> bool:
        """Handshake with these ranks, one after another; False, and `dead` says where, if one does not answer."""
        instance = self._instance(leg)
        for dp, tp in keys:
            if (instance, (dp, tp)) in self.agents:
                continue
            dialled = tp if tp is not None else self.targets(leg)[0].tp_rank
            # READ knows one host only, and no pods.
            port = leg.handshake_port + self.me.release.call("dial")(dp, dialled, as_int(leg.peer_tp))
            rank = self.context.network.owner((leg.host, port))
            if rank is None:
                self.dead = (leg.host, port)
                self.context.log("dial_dead", self.name, fields=Dial(port, dp, dialled))
                return False
            self.agents[instance, (dp, tp)] = rank
            self.context.log("dialled", self.name, rank.name, fields=Dial(port, dp, dialled))
        return True

    def _instance(self, leg: Leg) -> int:
        return self.context.setup.prefill.instance_at(leg.host)

    def targets(self, leg: Leg) -> list[Target]:
        """The prefill ranks that the release's map gives this rank, with their heads."""
        release = self.me.release
        if not isinstance(leg.peer_tp, (int, float)):
            raise PeerRefusal("TypeError", f"TP size {leg.peer_tp!r} is compared with a number")
        size = release.call("unknown_tp_map")(leg.peer_tp, self.me.tp)
        targets: list[Target] = release.call("read_map")(self.rank.tp, self.me.tp, size, self.context.geometry)
        return targets

    def _flexible(self, leg: Leg) -> bool:
        return (
            self.me.release.read_flex == "mla_tp1"
            and self.me.tp == 1
            and self.context.geometry.mla
            and as_int(leg.dp_size) == 1
            and as_int(leg.peer_tp) > 1
        )

    # -- reading ----------------------------------------------------------------------------------------------

    def plan(self, leg: Leg, transfer: Transfer, local: Sequence[list[int]]) -> list[Source]:
        """Sources and batches of one request, for its block tables. Raises PeerRefusal where `start_load_kv` raises."""
        release = self.me.release
        flexible = self._flexible(leg)
        if flexible:
            targets = [Target(self._reads_started % as_int(leg.peer_tp), 0, 0, 1)]
            self._reads_started += 1
        else:
            targets = self.targets(leg)
        dp = as_int(leg.dp_rank) if release.read_dp == "param" else 0
        pairs = self._pairs(leg, local, transfer) if any(local) else []
        sources = []
        for target in targets:
            self._check_states(leg)
            rank = self.agents.get((self._instance(leg), (dp, target.tp_rank if flexible or len(targets) > 1 else None)))
            if rank is None:
                raise PeerRefusal("KeyError", f"no session to prefill DP rank {dp}")
            refused_at, refusal = self._check_heads(rank, leg)
            if refusal is not None and refused_at == 0:
                raise refusal
            batches = partial(self._batches, target, rank, pairs, refused_at)
            sources.append(Source(target.tp_rank, rank, batches() if pairs else [], batches, refused_at, refusal))
        return sources

    def _check_heads(self, rank: PrefillRank, leg: Leg) -> tuple[int, PeerRefusal | None]:
        """The first layer that the release's guard refuses, and its refusal."""
        guard, size = self.me.release.call("read_guard"), self.me.release.call("unknown_tp_guard")(leg.peer_tp, self.me.tp)
        refused: list[tuple[int, PeerRefusal]] = []
        for mine in self.me.groups:  # layer by layer: prefill may have other groups, if only one side has the hybrid manager
            if mine.geometry.state:
                continue
            theirs = rank.me.groups[rank.me.places[mine.layers[0]][0]]
            try:
                guard(self.me.tp, size, mine.shape, rank.me.advertised(theirs), self._guarded(mine.geometry))
            except PeerRefusal as refusal:
                refused.append((mine.layers[0], refusal.due_to("read_guard")))
        return min(refused, key=lambda pair: pair[0]) if refused else (NEVER, None)

    def _check_states(self, leg: Leg) -> None:
        """Recurrent states are read at equal TP only."""
        if not self.context.geometry.has_states:
            return
        size = self.me.release.call("unknown_tp_states_read")(leg.peer_tp, self.me.tp)
        if size != self.me.tp:
            policy = "states" if size else "unknown_tp_states_read"
            raise PeerRefusal("NotImplementedError", f"recurrent states of TP size {size} to TP size {self.me.tp}", policy)

    def _guarded(self, kind: Geometry) -> Geometry:
        """A kind of layer as the guard sees it: how many heads there are in all it takes from the model's config."""
        model = self.context.geometry
        return msgspec.structs.replace(kind, kv_heads=MOST_HEADS) if model.mla and not kind.mla else kind

    def _batches(self, target: Target, rank: PrefillRank, pairs: list[Pairs], refused_at: int) -> list[Batch]:
        """The batch of each group."""
        return [
            self._batch(target, rank, mine, theirs, pairs[mine.table], refused_at)
            for mine, theirs in zip(self.me.groups, rank.me.groups, strict=True)
        ]

    def _pairs(self, leg: Leg, local: Sequence[list[int]], transfer: Transfer) -> list[Pairs]:
        """Which of our blocks takes which of prefill's, by block table."""
        me, pair = self.me, self.me.release.call("read_pairing")
        skipped = transfer.request.decode_hit_blocks if transfer.request.suffix_only else 0
        pairs = []
        for table, ours, theirs in zip(me.tables, local, self._remote_blocks(leg, local), strict=True):
            if kept := table.kept(me.shape.block_size):
                ours, theirs = me.release.call("windows")(ours, theirs, kept, transfer.request.blocks - skipped)
            pairs.append(pair(ours, theirs, 0 if kept or table.state else skipped))
        return pairs

    def _batch(
        self, target: Target, rank: PrefillRank, my_group: Group, their_group: Group, pairs: Pairs, refused_at: int
    ) -> Batch:
        """The batch of each layer of a group."""
        geometry, mine, theirs, release = my_group.geometry, my_group.shape, their_group.shape, self.me.release
        if not pairs:
            return Batch(None, 0)
        local, remote = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        self._check_bounds(local, remote, mine.num_blocks, theirs.num_blocks)
        source = SourceCache(theirs, rank.engine.contents, geometry.heads_of(rank.tp, rank.me.tp).start)
        sliced = release.read_plan == "head_slices"
        if release.read_plan == "slices_if_unlike" and (advertised := rank.me.advertised(their_group)) is not None:
            sliced = mine.advertised != advertised.advertised
        if sliced:
            # A map names the heads of the model as a whole; with layers of two kinds TP is equal, so all heads.
            count = mine.heads if self.context.geometry.mixed or geometry.state else target.count
            if my_group.layers[0] < refused_at:
                self._check_slice(mine, theirs, target, count)
            return head_slices(geometry, source, mine, remote, local, Slice(target.remote, target.local, count))
        return whole_blocks(geometry, source, mine, remote, local, by_reader=True)

    def _check_slice(self, mine: CacheShape, theirs: CacheShape, target: Target, count: int) -> None:
        """The heads of a slice must be there, and alike, on both sides."""
        check_slices(mine, theirs)
        if target.local + count > mine.heads or target.remote + count > theirs.heads:
            heads = f"heads {target.remote}+{count} of {theirs.heads} to {target.local}+{count} of {mine.heads}"
            raise PeerRefusal("ValueError", f"{heads} a rank", "read_plan")

    def _remote_blocks(self, leg: Leg, local: Sequence[list[int]]) -> list[list[int]]:
        """The block ids in the leg by block table, as this release reads them; one that expects other lists dies over it."""
        given, policy = leg.blocks, self.me.release.block_ids
        if not isinstance(given, list):
            raise PeerRefusal("TypeError", f"remote_block_ids {given!r:.40} is no list")
        grouped = all(isinstance(group, list) for group in given)
        if policy == "groups" and not grouped:
            raise PeerRefusal("TypeError", "block ids without groups")
        if policy == "flat" and grouped:
            raise PeerRefusal("AssertionError", f"{len(local[0])} local blocks and {len(given)} remote ones: block ids in groups")
        tables = given if grouped and given else [given]
        if not all(isinstance(block, int) for table in tables for block in table):
            raise PeerRefusal("TypeError", f"remote_block_ids {given!r:.40} holds no block ids")
        if len(tables) != len(local):
            raise PeerRefusal(
                "ValueError", f"block ids of {len(tables)} block tables, and decode has {len(local)}", "hybrid_manager"
            )
        return [list(table) for table in tables]

    def _check_bounds(self, local: Any, remote: Any, mine: int, theirs: int) -> None:
        """A block id beyond a pool: some releases look, all pass over what MoRI takes for an address."""
        lowest, highest = min(int(local.min()), int(remote.min())), max(int(local.max()) - mine, int(remote.max()) - theirs)
        if lowest < 0:  # no offset is negative
            raise PeerRefusal("TypeError" if self.me.release.block_bounds == "region" else "ValueError", f"block {lowest}")
        if highest >= 0 and self.me.release.block_bounds == "pool":
            raise PeerRefusal("ValueError", f"block {max(int(local.max()), int(remote.max()))} is out of range")

    def post(self, sources: list[Source], transfer: Transfer) -> Landing:
        """Post the reads of all layers; what lands when, and what MoRI refuses or a planned fault spoils."""
        clock, layers = self.context.clock, self.context.geometry.layers
        if transfer.posted_ns < 0:
            transfer.posted_ns = clock.now
        done, error, bad = [clock.now] * layers, "", set()
        for source in sources:
            if any(copy is None and entries for copy, entries in source.batches):
                error = "length out of range"
                self.context.log("transfer_failed", self.name, source.rank.name, transfer.index, fields=Failed(error, "bounds"))
            for layer in range(min(layers, source.refused_at) if source.batches else 0):
                copy, entries = source.batches[self.me.places[layer][0]]
                if copy is not None:
                    done[layer], failed = self._post_layer(source, copy, entries, transfer, layer, done[layer])
                    error = failed or error
                    bad |= {layer} if failed else set()
        return Landing(done, error, next((source.refusal for source in sources if source.refusal), None), frozenset(bad))

    def _post_layer(self, source: Source, copy: Copy, entries: int, transfer: Transfer, layer: int, done: int) -> tuple[int, str]:
        """Post one batch; when its layer is over, and the error it ends with."""
        clock, fabric = self.context.clock, self.context.fabric
        if source.rank.gone:
            broken = broken_session(self.context)
            self.context.log("transfer_failed", self.name, source.rank.name, transfer.index, layer, Failed(broken.error, "gone"))
            return max(done, broken.done_at), broken.error
        busy_ns, post_at = fabric.occupancy_ns(copy.size_bytes, "read"), clock.now
        careful = self._faulted or entries * self.context.geometry.layers > self._sq_depth
        if careful:
            post_at = self.rank.nic.queue(clock.now, entries, self._sq_depth)
            if error := self._no_room(entries, post_at):
                self.context.log("transfer_failed", self.name, source.rank.name, transfer.index, layer, Failed(error, "queue"))
                return done, error
        land = source.rank.nic.occupy(self.rank.nic, post_at, busy_ns) + fabric.tail_ns(busy_ns, "read")
        if not careful:
            self._land_at(land, source, copy, transfer, layer)
            return max(done, land), ""
        self.rank.nic.queued(land, entries)
        effect = transfer_effect(self.context, "read", source.rank.name, self.name, transfer.index, layer, land)
        error = effect.refused if self.me.release.sq_retry == "none" or effect.refused != "SQ full" else ""
        if effect.land_at is not None and not error:
            self._land_at(effect.land_at, source, copy.part(effect.fraction), transfer, layer)
        if error or effect.error:
            self.context.log(
                "transfer_failed", self.name, source.rank.name, transfer.index, layer, Failed(error or effect.error, "planned")
            )
        return max(done, effect.done_at), error or effect.error

    def _no_room(self, entries: int, room_at: int) -> str:
        """Why the send queue can't take a batch: READ tries again until the transfer timeout in 0.26+."""
        if entries > self._sq_depth:
            return "SQ request exceeds capacity"
        patience = self.context.setup.transfer_timeout_ns if self.me.release.sq_retry == "read" else 0
        patience = max(patience, round(self.context.setup.scenario.rdma.sq_wait_s * 1e9))
        return "SQ full" if room_at - self.context.clock.now > patience else ""

    def _land_at(self, at: int, source: Source, copy: Copy, transfer: Transfer, layer: int) -> None:
        def landed(_event: Any) -> None:
            # Prefill may have given the blocks away before the NIC read them: what lands is what is there now.
            if self.rank.gone or source.rank.gone:
                return
            now = source.again()[self.me.places[layer][0]][0] if transfer.source_reused and source.again else copy
            self.rank.land(layer, now or copy, transfer, source.rank.name, "read")

        clock = self.context.clock
        self.context.note_post("read", at, source.rank.name, self.name, transfer.index, layer)
        if at <= clock.now:
            landed(None)
        else:
            clock.after(at - clock.now, landed)

    # -- release ----------------------------------------------------------------------------------------------

    def send_release(self, leg: Leg, tps: list[int], transfer: Transfer) -> None:
        """Tell prefill's ranks, as this release knows them, that the blocks are read (or that the read failed)."""
        release = self.me.release
        if not isinstance(leg.transfer_id, str):
            return  # every release warns of such an id and sends nothing (measured)
        size = release.call("unknown_tp_map")(leg.peer_tp, self.me.tp)
        holders: Sequence[int] = release.call("release_to")(self.rank.tp, tps, self.me.tp, size)
        if self._flexible(leg) and release.release_to == "holders":
            holders = range(min(as_int(leg.peer_tp), MOST_RANKS))
        dp = as_int(leg.dp_rank) if release.read_dp == "param" else 0
        consumer = 1 if release.release_acks == "one" else self.me.tp
        for tp in holders:
            port = leg.notify_port + release.call("release_port")(dp, tp, as_int(leg.peer_tp), self.me.tp)
            self.context.log("release_sent", self.name, request=transfer.index, fields=Sent(port))
            self.context.network.send(
                self.name, (leg.host, port), transfer.index, "release",
                lambda rank: rank.on_release(leg.transfer_id, transfer, consumer, self.name),
            )  # fmt: skip
