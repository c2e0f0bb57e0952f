"""What a scheduler tells prefill's ranks in WRITE when it has given a request its blocks.

It is decode's scheduler that does so; prefill's has the same code, and runs it where a leg asks prefill for a remote prefill.
"""

from __future__ import annotations

from typing import Any

from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import Sent
from kvcover.sim.kernel.network import Address, Deliver
from kvcover.sim.moriio.legs import address_in_id, peer_address, pods_of
from kvcover.sim.moriio.rank import Tables
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.maps import MOST_RANKS
from kvcover.sim.releases.ports import fold
from kvcover.sim.releases.sizes import as_int
from kvcover.sim.scenario.context import Context
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.endpoint import Endpoint


class Announcer:
    """The messages of one scheduler, that of DP rank `dp` of `me`."""

    def __init__(self, context: Context, me: Endpoint, dp: int, name: str) -> None:
        self._context, self._me, self._name = context, me, name
        self._dp, self._pod = me.own_dp(dp), me.own_pod(dp)

    def blocks(self, transfer: Transfer, params: Params, transfer_id: Any, blocks: Tables) -> None:
        """Send our block ids to prefill's ranks, as many as this release counts."""
        self._read_dp_size(params)
        if not self._is_ours(params):
            return
        for address in self._prefill_ports(transfer, params, folded=True):
            self._send(address, transfer, "blocks_ready_sent", "remote_blocks",
                       lambda rank: rank.on_blocks_ready(transfer_id, transfer, blocks, self._dp))  # fmt: skip

    def nothing(self, transfer: Transfer, params: Params, transfer_id: Any, blocks: Tables) -> None:
        """Nothing is needed from prefill: whoever has the blocks computes the request itself (vllm#58108)."""
        policy = self._me.release.external_zero
        if policy == "full_table":
            self.blocks(transfer, params, transfer_id, blocks)
        elif policy == "empty_list":
            self.blocks(transfer, params, transfer_id, [])
        else:
            self._read_dp_size(params)
            if self._is_ours(params):
                self.release(transfer, params, transfer_id)

    def release(self, transfer: Transfer, params: Params, transfer_id: Any) -> None:
        """Tell prefill's ranks that decode needs nothing of this request."""
        consumer = self._me.tp if self._me.release.early_release_acks == "decode_size" else 1
        for address in self._prefill_ports(transfer, params, folded=False):
            self._send(address, transfer, "release_sent", "release",
                       lambda rank: rank.on_release(transfer_id, transfer, consumer, self._name))  # fmt: skip

    def _send(self, address: Address, transfer: Transfer, event: str, message: str, deliver: Deliver) -> None:
        self._context.log(event, self._name, request=transfer.index, fields=Sent(address[1]))
        self._context.network.send(self._name, address, transfer.index, message, deliver)

    def _read_dp_size(self, params: Params) -> None:
        """Releases that know pods read the peer's DP size for a warning only, and die of one that is no number."""
        if self._me.release.blocks_ready_pods == "by_pod":
            as_int(params.get("remote_dp_size", 1) or 1)

    def _is_ours(self, params: Params) -> bool:
        """Whether it is this DP rank that tells prefill of the request."""
        ours: bool = self._me.release.call("blocks_ready_gate")(params, self._dp, self._pod)
        return ours

    def _prefill_ports(self, transfer: Transfer, params: Params, folded: bool) -> list[Address]:
        """Notify addresses of the prefill ranks that this release knows; unfolded ones know nothing of pods."""
        release, setup, peer = self._me.release, self._context.setup, self._context.setup.prefill
        host, _handshake, notify_port = peer_address(params, release.address, address_in_id(setup, transfer, peer))
        dp = params.get("remote_dp_rank", 0)
        if not isinstance(dp, int):
            raise PeerRefusal("TypeError", f"remote_dp_rank {dp!r} in port arithmetic")
        local = _local_size(params) if release.blocks_ready_pods == "by_pod" and folded else 0
        if local:
            hosts = pods_of(params, host)
            host = hosts[dp // local] if dp // local < len(hosts) else hosts[0]
        width = min(release.call("blocks_ready_width")(params, self._me.tp, peer.tp), MOST_RANKS)
        offset = release.call("notify_ports")
        return [(host, notify_port + offset(fold(dp, local), tp, peer.tp)) for tp in range(width)]


def _local_size(params: Params) -> int:
    """DP ranks a pod of the peer; what is no number is 0, for one host."""
    try:
        return as_int(params.get("remote_dp_size_local", 0) or 0)
    except PeerRefusal:
        return 0
