"""Where a prefill rank writes: which decode ranks it maps onto, and the batch of a layer for each of them."""

from __future__ import annotations

import numpy as np

from kvcover.sim.cache.batch import Batch, Slice, head_slices, state_slice, whole_blocks
from kvcover.sim.cache.geometry import check_slices
from kvcover.sim.cache.ledger import Codes, SourceCache
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.write_job import Job, Wire
from kvcover.sim.releases.maps import Target
from kvcover.sim.releases.sizes import as_int


class WritePlan:
    """The offsets of one prefill rank, whose engine's blocks hold `contents`."""

    def __init__(self, rank: Rank, contents: Codes) -> None:
        self.rank = rank
        self.context = rank.context
        self.me = rank.me
        self._contents = contents
        release = self.me.release
        self._map, self._pair, self._known_size = (
            release.call("write_map"),
            release.call("write_pairing"),
            release.call("unknown_tp_map"),
        )

    def find_targets(self, job: Job) -> PeerRefusal | None:
        """Map this rank onto the peer; a refusal is returned, or raised where the release raises it in the forward."""
        if job.targets or job.leg is None:
            return None
        size = self._known_size(as_int(job.leg.peer_tp), self.me.tp)  # not a number: raises in the forward of any release
        try:
            job.targets = self._map(self.rank.tp, self.me.tp, size, self.context.geometry)
        except PeerRefusal as refusal:
            if self.me.release.write_map_error != "task_fails":
                raise refusal.due_to("write_map_error") from None
            return refusal
        return None

    def wires(self, job: Job, group: int) -> list[Wire]:
        """Where every layer of a group goes: the same ranks and offsets, as layers have memory of their own."""
        wires = []
        if not job.targets and self.find_targets(job) is not None:
            return [Wire(None, None, 0, 0, refusal=PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}"))]
        state = self.me.groups[group].geometry.state
        for key, target in zip(job.keys(job.decode_dp), job.targets, strict=False):
            if not target.count and not state:
                continue  # another rank writes the same heads
            rank = job.peer.agents.get(key)
            try:
                if rank is None:
                    raise PeerRefusal("KeyError", f"no session to decode DP rank {job.decode_dp}")
                copy, entries = self._batch(job, target, rank, group)
            except PeerRefusal as refusal:
                wires.append(Wire(rank, None, 0, 0, refusal=refusal))
                break
            fabric = self.context.fabric
            busy_ns = fabric.occupancy_ns(copy.size_bytes, "write") if copy else 0
            wires.append(Wire(rank, copy, busy_ns, fabric.tail_ns(busy_ns, "write"), entries))
        return wires

    def _batch(self, job: Job, target: Target, rank: Rank, group: int) -> Batch:
        """The batch of a layer of a group to one decode rank and its work requests; no batch when MoRI refuses it."""
        assert job.blocks is not None and job.transfer.prefill_tables is not None and job.leg is not None
        mine, theirs = self.me.groups[group], rank.me.groups[group]
        geometry = mine.geometry
        blocks = job.transfer.prefill_tables[mine.table].tolist()
        if self.me.release.write_clamp == "prompt_blocks":
            blocks = blocks[: job.transfer.request.prefill_size]
        part: Slice | None = None
        if geometry.state:
            size = self.me.release.call("unknown_tp_states_write")(as_int(job.leg.peer_tp), self.me.tp)
            if size <= 0:
                text = f"recurrent states of TP size {self.me.tp} to TP size {job.leg.peer_tp}"
                raise PeerRefusal("NotImplementedError", text, "unknown_tp_states_write")
            part = state_slice(self.rank.tp, self.me.tp, target.tp_rank, size, mine.shape.heads, theirs.shape.heads)
        elif self.me.release.write_plan == "head_slices" and self._by_heads(job, target, rank, group):
            part = Slice(target.local, target.remote, target.count)
            equal = self._known_size(as_int(job.leg.peer_tp), self.me.tp) == self.me.tp
            if self.context.geometry.mixed and equal and self.me.release.slice_heads == "of_layer":
                part = Slice(0, 0, mine.shape.heads)
        pairs = self._pair(blocks, job.blocks[mine.table])
        local, remote = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        source = SourceCache(mine.shape, self._contents, geometry.heads_of(self.rank.tp, self.me.tp).start)
        if part is not None:
            return head_slices(geometry, source, theirs.shape, local, remote, part)
        return whole_blocks(geometry, source, theirs.shape, local, remote, by_reader=False)

    def _by_heads(self, job: Job, target: Target, rank: Rank, group: int) -> bool:
        """Whether heads are moved one by one, not whole blocks (0.33.0). Raises PeerRefusal where they can't be.

        The target counts the heads that the model as a whole has, whatever the layers of this group have.
        """
        assert job.leg is not None
        mine, theirs = self.me.groups[group].shape, rank.me.groups[group].shape
        advertised = rank.me.advertised(rank.me.groups[group]) if mine.planes > 1 else None
        advertises = rank.me.release.advertised == "layouts"
        if advertises and mine.block_size != theirs.block_size:
            raise PeerRefusal("MoRIIOError", f"{mine.block_size} tokens a block here, {theirs.block_size} at the peer")
        assumed = self.context.geometry.heads_per_rank(self._known_size(as_int(job.leg.peer_tp), self.me.tp))
        whole = target.count == self.me.shape.heads == assumed
        if whole and (advertised is None or mine.advertised == advertised.advertised):
            return False
        if advertised is None:
            why = "the peer advertises none" if mine.planes > 1 else "a latent has none"
            raise PeerRefusal("MoRIIOError", f"a write by heads needs a layout of heads, and {why}")
        check_slices(mine, advertised)
        if target.local + target.count > mine.heads or target.remote + target.count > advertised.heads:
            heads = f"heads {target.local}+{target.count} of {mine.heads} to {target.remote}+{target.count} of {advertised.heads}"
            raise PeerRefusal("ValueError", f"{heads} a rank")
        return True
