"""What differs between vLLM releases, as data: one `ConnectorRelease` a release, its fields names of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvcover.sim.errors import InputError, nearest
from kvcover.sim.releases.policies import POLICIES


class ConnectorRelease(msgspec.Struct, frozen=True, kw_only=True):
    """The MoRI-IO connector of one vLLM release. Every field but the first two names a policy of `policies`."""

    name: str
    date: str
    peer_tp: str
    unknown_tp_map: str
    unknown_tp_guard: str
    transfer_id_missing: str
    address: str
    ports: str
    dial: str
    write_map: str
    write_map_error: str
    unsupported: str
    write_plan: str
    write_pairing: str
    blocks_ready_width: str
    blocks_ready_gate: str
    write_done_to: str
    completion: str
    expiry: str
    sealing: str
    blocks_ready_again: str
    write_failure: str
    decode_timer: str
    abort_waiting: str
    reaper: str
    match_write: str
    match_read: str
    prefill_leg_read: str
    read_failure: str
    read_map: str
    read_flex: str
    read_dp: str
    read_handshake: str
    read_guard: str
    cache_layouts: str
    block_bounds: str
    read_pairing: str
    read_barrier: str
    read_done: str
    release_to: str
    release_port: str
    acks: str
    block_ids: str
    recv_abort: str
    sq_retry: str
    write_wait: str
    last_chunk: str
    plain_chunks: str
    write_clamp: str
    external_zero: str
    early_release_acks: str
    early_ack: str
    late_report: str
    pod_routing: str
    windows: str
    mixed_layers: str
    states: str
    failed_blocks: str

    def call(self, field: str) -> Callable[..., Any]:
        """The function that this release uses for `field`."""
        function = POLICIES[field][getattr(self, field)].call
        assert function is not None, f"{field} is a plain name, not a function"
        return function

    def overridden(self, changes: Mapping[str, str]) -> ConnectorRelease:
        """This record with some policies exchanged, so that a fix can be tried before it exists.

        Raises InputError for unknown fields or names and for combinations that make no sense.
        """
        for field, name in changes.items():
            if field not in POLICIES:
                raise InputError(f"overrides.{field}", "no such policy field", nearest(field, POLICIES))
            if name not in POLICIES[field]:
                raise InputError(f"overrides.{field}", f"no policy {name!r}", nearest(name, POLICIES[field]))
        record = msgspec.structs.replace(self, **changes)
        for field, name, other, bad, instead in _NONSENSE:
            have = getattr(record, other)
            if getattr(record, field) == name and have in bad:
                raise InputError(
                    f"overrides.{field}", f"{name!r} makes no sense with {other} {have!r}", f"override {other} to {instead!r} too"
                )
        return record


# Combinations that no connector could mean: field, policy, other field, its policies that don't go with it, one that does.
_NONSENSE = (
    ("write_map", "fan", "write_plan", ("local_strides",), "head_slices"),
    ("read_map", "gather", "read_guard", ("layouts", "replicated_heads"), "none"),
    ("completion", "all_writers", "write_done_to", ("own_rank",), "targets"),
)

_0_24 = ConnectorRelease(
    name="0.24.0",
    date="2026-06-30",
    peer_tp="tp_size_or_1",
    unknown_tp_map="refused",
    unknown_tp_guard="refused",
    transfer_id_missing="key_error",
    address="params_first",
    ports="dp_plus_tp",
    dial="dp_plus_tp",
    write_map="own_rank",
    write_map_error="task_fails",
    unsupported="not_checked",
    write_plan="local_strides",
    write_pairing="equal",
    blocks_ready_width="own_size",
    blocks_ready_gate="none",
    write_done_to="own_rank",
    completion="first_message",
    expiry="silent",
    sealing="scheduled_tasks",
    blocks_ready_again="starts_over",
    write_failure="silent",
    decode_timer="none",
    abort_waiting="leak",
    reaper="both_modes",
    match_write="always",
    match_read="always",
    prefill_leg_read="both_modes",
    read_failure="garbage",
    read_map="own_rank",
    read_flex="none",
    read_dp="zero",
    read_handshake="lazy",
    read_guard="none",
    cache_layouts="split_interleaved",
    block_bounds="region",
    read_pairing="exact",
    read_barrier="none",
    read_done="last_layer",
    release_to="own_rank",
    release_port="tp",
    acks="any",
    block_ids="flat",
    recv_abort="none",
    sq_retry="none",
    write_wait="all_statuses",
    last_chunk="by_blocks",
    plain_chunks="key_error",
    write_clamp="none",
    external_zero="full_table",
    early_release_acks="one",
    early_ack="crash",
    late_report="crash",
    pod_routing="none",
    windows="as_full",
    mixed_layers="any",
    states="no_hybrid",
    failed_blocks="any",
)
_0_25 = msgspec.structs.replace(
    _0_24,
    name="0.25.1",
    date="2026-07-14",
    write_map="floor",
    read_map="floor",
    read_guard="replicated_heads",
    release_to="sources",
    acks="fan_in",
)
_0_26 = msgspec.structs.replace(
    _0_25,
    name="0.26.0",
    date="2026-07-25",
    write_pairing="head",
    cache_layouts="and_packed",
    read_pairing="remote_tail_as_local",
    sq_retry="read",
    external_zero="empty_list",
)
_0_27 = msgspec.structs.replace(
    _0_26,
    name="0.27.0",
    date="2026-08-10",
    peer_tp="remote_tp_size_or_tp_size_or_0",
    unknown_tp_map="zero_is_own",
    unknown_tp_guard="zero_is_own",
    dial="dp_times_tp_plus_tp",
    read_flex="mla_tp1",
    read_dp="param",
    read_handshake="eager_vote",
    release_port="raw",
)
_0_28 = msgspec.structs.replace(
    _0_27,
    name="0.28.0",
    date="2026-08-26",
    transfer_id_missing="synthesised",
    address="request_id_first",
    blocks_ready_gate="leader_override_master",
    read_barrier="per_layer",
    read_done="all_layers",
    recv_abort="silent",
    early_release_acks="decode_size",
    early_ack="parked",
    plain_chunks="skipped",
    pod_routing="worker",
)
_0_29 = msgspec.structs.replace(_0_28, name="0.29.0", date="2026-09-09", cache_layouts="standard")
_0_30 = msgspec.structs.replace(
    _0_29,
    name="0.30.0",
    date="2026-09-22",
    read_pairing="head",
    block_ids="groups",
    windows="table_tail",
    mixed_layers="hybrid_off",
    states="refused",
)
_0_31 = msgspec.structs.replace(
    _0_30,
    name="0.31.0",
    date="2026-10-20",
    read_pairing="suffix",
    block_bounds="pool",
    prefill_leg_read="write_only",
    read_failure="load_errors",
    read_barrier="per_layer_or_step",
    write_wait="first_failure",
    pod_routing="task",
    failed_blocks="one_table",
    states="read",
)
_0_32 = msgspec.structs.replace(
    _0_31,
    name="0.32.0",
    date="2026-10-20",
    match_write="if_do_remote_prefill",
    last_chunk="by_tokens",
    write_clamp="prompt_blocks",
)
_0_33 = msgspec.structs.replace(
    _0_32,
    name="0.33.0",
    date="",
    write_map="fan",
    write_map_error="forward_raises",
    write_plan="head_slices",
    blocks_ready_width="remote_tp_size_or_tp_size_or_own",
    write_done_to="targets",
    completion="all_writers",
    expiry="write_failed",
    reaper="read_only",
    match_read="if_do_remote_prefill",
    read_guard="layouts",
    read_barrier="step",
    release_to="holders",
    release_port="effective",
    external_zero="release",
    early_release_acks="one",
    mixed_layers="any",
    states="read_write",
)
_REFERENCE = msgspec.structs.replace(
    _0_33,
    name="reference",
    peer_tp="true_size",
    blocks_ready_width="true_size",
    transfer_id_missing="request_refused",
    ports="dp_times_tp_plus_tp",
    blocks_ready_gate="none",
    unsupported="request_refused",
    read_handshake="eager_bounded",
    read_map="gather",
    read_guard="none",
    cache_layouts="any",
    read_pairing="by_position",
    read_barrier="step_or_fail",
    block_ids="either",
    sealing="every_layer",
    blocks_ready_again="ignored",
    write_failure="write_failed",
    decode_timer="recv_abort_timeout",
    abort_waiting="freed",
    late_report="ignored",
    windows="prompt_tail",
    failed_blocks="any",
)

RELEASES: dict[str, ConnectorRelease] = {
    record.name: record for record in (_0_24, _0_25, _0_26, _0_27, _0_28, _0_29, _0_30, _0_31, _0_32, _0_33, _REFERENCE)
}
NEWEST = "0.33.0"
# Patch releases whose connector files are the same as another's.
ALIASES = {"0.25.0": "0.25.1", "0.27.1": "0.27.0"}


def get_release(name: str, place: str = "release") -> ConnectorRelease:
    """The record of a release; raises InputError with the nearest name."""
    record = RELEASES.get(ALIASES.get(name, name))
    if record is None:
        raise InputError(place, f"no release {name!r}", nearest(name, [*RELEASES, *ALIASES]))
    return record
