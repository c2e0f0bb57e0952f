"""How an engine reads its leg: from the dictionary `kv_transfer_params` to numbers, with the connector's own errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcover.sim.errors import PeerRefusal
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.sizes import as_int
from kvcover.sim.scenario.endpoint import Endpoint
from kvcover.sim.scenario.setup import Setup

_ADDRESS_KEYS = ("remote_host", "remote_handshake_port", "remote_notify_port")


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine made of its leg. `peer_tp` is the peer's TP size as read, 0 when unknown.

    `pod_hosts` and `pod_dp` (DP ranks a pod, 0 when there are no pods) are what 0.28+ makes of `remote_hosts` and
    `remote_dp_size_local`.
    """

    transfer_id: Any
    host: str
    handshake_port: int
    notify_port: int
    peer_tp: Any
    dp_size: Any
    dp_rank: Any
    blocks: Any
    pod_hosts: tuple[str, ...]
    pod_dp: int

    def pod_host(self, dp: int) -> str:
        """The host of the peer's DP rank; the first one when the list is too short."""
        pod = dp // self.pod_dp if self.pod_dp else 0
        return self.pod_hosts[pod] if pod < len(self.pod_hosts) else self.pod_hosts[0]


def transfer_id_of(params: Mapping[str, Any], policy: str, request_id: str) -> Any:
    """The id under which both engines should know the transfer."""
    if policy == "synthesised":
        return params.get("transfer_id", f"sidecar-{request_id}")
    if "transfer_id" not in params:
        raise PeerRefusal("KeyError", "'transfer_id'")
    return params["transfer_id"]


def mapped_id_of(params: Mapping[str, Any], policy: str, request_id: str) -> Any:
    """The id under which a scheduler maps a request; since 0.28.0 it takes an empty one for missing, and its workers do not.

    Raises PeerRefusal where the scheduler raises.
    """
    found = transfer_id_of(params, policy, request_id)
    mapped = found or f"sidecar-{request_id}" if policy == "synthesised" else found
    check_hashable(mapped)
    return mapped


def is_no_key(transfer_id: Any) -> bool:
    """Whether it can't be looked up in a table."""
    return isinstance(transfer_id, (list, dict))


def check_hashable(transfer_id: Any) -> None:
    """What can be no key of a table ends the step that looks it up."""
    if is_no_key(transfer_id):
        raise PeerRefusal("TypeError", f"unhashable type: '{type(transfer_id).__name__}'")


PeerAddress = tuple[str, int, int]
"""Host, handshake and notify base port of an instance."""


def address_in_id(setup: Setup, transfer: Transfer, peer: Endpoint) -> PeerAddress | None:
    """The peer's address as the request's id names it; None if ids name none."""
    if not setup.scenario.request_id_addresses:
        return None
    side, request = "prefill" if peer is setup.prefill else "decode", transfer.request
    host = peer.host_of(request.prefill_dp if side == "prefill" else request.decode_dp)
    off = transfer.ports_off[side]
    return host, peer.handshake_port + off, peer.notify_port + off


def peer_address(params: Mapping[str, Any], policy: str, in_id: PeerAddress | None) -> PeerAddress:
    """Host, handshake and notify base port of the peer: named in the params, and, `in_id`, by most routers in the request id."""
    named = [params.get(key) for key in _ADDRESS_KEYS]
    in_params = None not in named and named[0] != ""
    if in_params and (policy == "params_first" or in_id is None):
        return str(named[0]), as_int(named[1]), as_int(named[2])
    if in_id is None:
        raise PeerRefusal("ValueError", "neither the request id nor the params name the peer's address")
    return in_id


def pods_of(params: Mapping[str, Any], host: str) -> tuple[str, ...]:
    """The peer's hosts, one a pod; without a list, the one host."""
    hosts = params.get("remote_hosts") or [host]
    return tuple(str(h) for h in hosts) if isinstance(hosts, list) else (str(hosts),)


def read_leg(params: Mapping[str, Any], me: Endpoint, peer: Endpoint, request_id: str, in_id: PeerAddress | None) -> Leg:
    """Parse a whole leg as prefill does in WRITE and decode in READ. Raises PeerRefusal where the connector raises."""
    release = me.release
    transfer_id = transfer_id_of(params, release.transfer_id_missing, request_id)
    host, handshake_port, notify_port = peer_address(params, release.address, in_id)
    for key in ("remote_block_ids", "remote_engine_id"):
        if key not in params:
            raise PeerRefusal("KeyError", repr(key))
    pod_hosts: tuple[str, ...] = (host,)
    pod_dp = 0
    if release.pod_routing != "none":
        pod_hosts = pods_of(params, host)
        pod_dp = as_int(params.get("remote_dp_size_local", params.get("remote_dp_size", 1)))
    return Leg(
        transfer_id=transfer_id,
        host=host,
        handshake_port=handshake_port,
        notify_port=notify_port,
        peer_tp=release.call("peer_tp")(params, me.tp, peer.tp),
        dp_size=params.get("remote_dp_size", 1),
        dp_rank=params.get("remote_dp_rank", 0),
        blocks=params["remote_block_ids"],
        pod_hosts=pod_hosts,
        pod_dp=pod_dp,
    )
