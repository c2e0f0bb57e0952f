"""What differs between vLLM releases, as data: one `ConnectorRelease` a release, its fields names of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.releases.policies import FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorRelease:
    """The MoRI-IO connector of one vLLM release, and the toy proxy that came with it. Every other field names a policy.

    `policies.FIELDS` says what the names mean; a test compares its names with the types here.
    """

    name: str
    date: str
    toy_proxy: str
    peer_tp: Literal["tp_size_or_1", "remote_tp_size_or_tp_size_or_0", "true_size"]
    unknown_tp_map: Literal["refused", "zero_is_own", "non_positive_is_own"]
    unknown_tp_guard: Literal["refused", "zero_is_own", "non_positive_is_own"]
    unknown_tp_states_read: Literal["refused", "zero_is_own"]
    unknown_tp_states_write: Literal["refused", "zero_is_own"]
    transfer_id_missing: Literal["key_error", "synthesised"]
    null_id: Literal["matched", "unmatched"]
    address: Literal["params_first", "request_id_first"]
    prefill_leg_read: Literal["both_modes", "write_only"]
    leg_error: Literal["engine_dies", "request_refused"]
    unsupported: Literal["not_checked", "request_refused"]
    cache_layouts: Literal["split_interleaved", "and_packed", "standard", "any"]
    latents: Literal["latent", "standard"]
    hybrid_manager: Literal["off", "on"]
    mixed_layers: Literal["any", "hybrid_off"]
    states: Literal["refused", "read", "read_write"]
    unfit_start: Literal["raises", "starts"]
    ports: Literal["dp_plus_tp", "dp_times_tp_plus_tp"]
    stage_ports: Literal["shared", "apart"]
    pod_ports: Literal["over_all_pods", "in_pod"]
    dial: Literal["dp_plus_tp", "dp_times_tp_plus_tp"]
    notify_ports: Literal["dp_plus_tp", "dp_times_tp_plus_tp"]
    pod_routing: Literal["none", "worker", "task"]
    match_write: Literal["always", "if_do_remote_prefill"]
    blocks_ready_width: Literal["own_size", "remote_tp_size_or_tp_size_or_own", "true_size"]
    blocks_ready_gate: Literal["none", "leader_override_master"]
    blocks_ready_pods: Literal["one_host", "by_pod"]
    external_zero: Literal["full_table", "empty_list", "release"]
    early_release_acks: Literal["one", "decode_size"]
    write_map: Literal["own_rank", "floor", "fan"]
    write_map_error: Literal["task_fails", "forward_raises"]
    write_plan: Literal["local_strides", "head_slices"]
    slice_heads: Literal["of_model", "of_layer"]
    advertised: Literal["regions", "layouts"]
    write_pairing: Literal["equal", "head"]
    write_clamp: Literal["none", "prompt_blocks"]
    last_chunk: Literal["by_blocks", "by_tokens"]
    plain_chunks: Literal["key_error", "skipped"]
    blocks_ready_again: Literal["starts_over", "ignored"]
    sealing: Literal["scheduled_tasks", "every_layer"]
    write_wait: Literal["all_statuses", "first_failure"]
    write_failure: Literal["silent", "write_failed"]
    write_failure_in_forward: Literal["raises", "ends_transfer"]
    expiry: Literal["silent", "write_failed"]
    write_done_to: Literal["own_rank", "targets"]
    reaper: Literal["both_modes", "read_only"]
    early_ack: Literal["crash", "parked"]
    completion: Literal["first_message", "all_writers"]
    write_failed_heard: Literal["unknown", "understood"]
    decode_timer: Literal["none", "recv_abort_timeout"]
    abort_waiting: Literal["leak", "freed"]
    late_report: Literal["crash", "ignored"]
    decode_leg_hold: Literal["reaped", "for_ever", "freed"]
    answer_blocks: Literal["flat", "groups"]
    answer_dp: Literal["none", "rank"]
    windows: Literal["table_tail", "prompt_tail"]
    match_read: Literal["always", "if_do_remote_prefill"]
    external_zero_read: Literal["full_table", "nothing"]
    abort_before_read: Literal["raises", "release"]
    empty_read: Literal["empty_batch", "release"]
    block_ids: Literal["flat", "groups", "either"]
    block_bounds: Literal["region", "pool"]
    read_map: Literal["own_rank", "floor", "gather"]
    read_flex: Literal["none", "mla_tp1"]
    read_dp: Literal["zero", "param"]
    read_handshake: Literal["lazy", "eager_vote", "eager_bounded"]
    read_queue: Literal["one_a_step", "all"]
    read_guard: Literal["none", "replicated_heads", "layouts"]
    read_plan: Literal["local_strides", "slices_if_unlike", "head_slices"]
    read_pairing: Literal["exact", "remote_tail_as_local", "head", "suffix", "by_position"]
    sq_retry: Literal["none", "read"]
    read_barrier: Literal["none", "per_layer", "per_layer_or_step", "step", "step_or_fail"]
    read_failure: Literal["garbage", "load_errors"]
    failed_blocks: Literal["one_table", "any"]
    failed_states: Literal["raises", "as_others"]
    read_done: Literal["last_layer", "all_layers"]
    recv_abort: Literal["none", "silent"]
    release_to: Literal["own_rank", "sources", "holders"]
    release_port: Literal["tp", "raw", "effective"]
    release_acks: Literal["one", "decode_size"]
    acks: Literal["any", "fan_in"]

    def call(self, field: str) -> Callable[..., Any]:
        """The function that this release uses for `field`."""
        function = FIELDS[field].policies[getattr(self, field)].call
        assert function is not None, f"{field} is a plain name, not a function"
        return function

    def overridden(self, changes: Mapping[str, str]) -> ConnectorRelease:
        """This record with some policies exchanged, so that a fix can be tried before it exists.

        Raises InputError for unknown fields or names and for combinations that make no sense.
        """
        for field, name in changes.items():
            if field not in FIELDS:
                raise InputError(f"overrides.{field}", "no such policy field", nearest(field, FIELDS))
            if name not in FIELDS[field].policies:
                raise InputError(f"overrides.{field}", f"no policy {name!r}", nearest(name, FIELDS[field].policies))
        record = ConnectorRelease(**{**asdict(self), **changes})
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
    ("read_map", "gather", "read_plan", ("local_strides", "slices_if_unlike"), "head_slices"),
    ("completion", "all_writers", "write_done_to", ("own_rank",), "targets"),
)

_0_24 = ConnectorRelease(
    name="0.24.0",
    date="2026-06-30",
    toy_proxy="toy-proxy 0.25.1",
    peer_tp="tp_size_or_1",
    unknown_tp_map="refused",
    unknown_tp_guard="refused",
    unknown_tp_states_read="refused",
    unknown_tp_states_write="refused",
    transfer_id_missing="key_error",
    null_id="matched",
    address="params_first",
    prefill_leg_read="both_modes",
    leg_error="engine_dies",
    unsupported="not_checked",
    cache_layouts="split_interleaved",
    latents="latent",
    hybrid_manager="off",
    mixed_layers="any",
    states="refused",
    unfit_start="raises",
    ports="dp_plus_tp",
    stage_ports="shared",
    pod_ports="over_all_pods",
    dial="dp_plus_tp",
    notify_ports="dp_plus_tp",
    pod_routing="none",
    match_write="always",
    blocks_ready_width="own_size",
    blocks_ready_gate="none",
    blocks_ready_pods="one_host",
    external_zero="full_table",
    early_release_acks="one",
    write_map="own_rank",
    write_map_error="task_fails",
    write_plan="local_strides",
    slice_heads="of_model",
    advertised="regions",
    write_pairing="equal",
    write_clamp="none",
    last_chunk="by_blocks",
    plain_chunks="key_error",
    blocks_ready_again="starts_over",
    sealing="scheduled_tasks",
    write_wait="all_statuses",
    write_failure="silent",
    write_failure_in_forward="raises",
    expiry="silent",
    write_done_to="own_rank",
    reaper="both_modes",
    early_ack="crash",
    completion="first_message",
    write_failed_heard="unknown",
    decode_timer="none",
    abort_waiting="leak",
    late_report="crash",
    decode_leg_hold="reaped",
    answer_blocks="flat",
    answer_dp="none",
    windows="table_tail",
    match_read="always",
    external_zero_read="full_table",
    abort_before_read="raises",
    empty_read="empty_batch",
    block_ids="flat",
    block_bounds="region",
    read_map="own_rank",
    read_flex="none",
    read_dp="zero",
    read_handshake="lazy",
    read_queue="one_a_step",
    read_guard="none",
    read_plan="local_strides",
    read_pairing="exact",
    sq_retry="none",
    read_barrier="none",
    read_failure="garbage",
    failed_blocks="any",
    failed_states="as_others",
    read_done="last_layer",
    recv_abort="none",
    release_to="own_rank",
    release_port="tp",
    release_acks="one",
    acks="any",
)
_0_25 = replace(
    _0_24,
    name="0.25.1",
    date="2026-07-14",
    null_id="unmatched",
    write_map="floor",
    read_map="floor",
    read_guard="replicated_heads",
    release_to="sources",
    release_acks="decode_size",
    acks="fan_in",
)
_0_26 = replace(
    _0_25,
    name="0.26.0",
    date="2026-07-25",
    toy_proxy="toy-proxy 0.27.0",
    cache_layouts="and_packed",
    external_zero="empty_list",
    write_pairing="head",
    external_zero_read="nothing",
    abort_before_read="release",
    read_pairing="remote_tail_as_local",
    sq_retry="read",
)
_0_27 = replace(
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
    read_queue="all",
    release_port="raw",
)
_0_28 = replace(
    _0_27,
    name="0.28.0",
    date="2026-08-26",
    toy_proxy="toy-proxy 0.30.0",
    transfer_id_missing="synthesised",
    address="request_id_first",
    pod_ports="in_pod",
    pod_routing="worker",
    blocks_ready_gate="leader_override_master",
    blocks_ready_pods="by_pod",
    early_release_acks="decode_size",
    plain_chunks="skipped",
    early_ack="parked",
    decode_leg_hold="for_ever",
    answer_dp="rank",
    read_barrier="per_layer",
    read_done="all_layers",
    recv_abort="silent",
)
_0_29 = replace(
    _0_28,
    name="0.29.0",
    date="2026-09-09",
    cache_layouts="standard",
    latents="standard",
)
_0_30 = replace(
    _0_29,
    name="0.30.0",
    date="2026-09-22",
    hybrid_manager="on",
    mixed_layers="hybrid_off",
    answer_blocks="groups",
    block_ids="groups",
    read_pairing="head",
)
_0_31 = replace(
    _0_30,
    name="0.31.0",
    date="2026-10-20",
    toy_proxy="toy-proxy 0.33.0",
    prefill_leg_read="write_only",
    states="read",
    pod_routing="task",
    write_wait="first_failure",
    empty_read="release",
    block_bounds="pool",
    read_pairing="suffix",
    read_barrier="per_layer_or_step",
    read_failure="load_errors",
    failed_blocks="one_table",
    failed_states="raises",
)
_0_32 = replace(
    _0_31,
    name="0.32.0",
    date="2026-10-20",
    match_write="if_do_remote_prefill",
    last_chunk="by_tokens",
    write_clamp="prompt_blocks",
)
_0_33 = replace(
    _0_32,
    name="0.33.0",
    date="",
    unknown_tp_states_read="zero_is_own",
    mixed_layers="any",
    states="read_write",
    blocks_ready_width="remote_tp_size_or_tp_size_or_own",
    external_zero="release",
    early_release_acks="one",
    write_map="fan",
    write_map_error="forward_raises",
    write_plan="head_slices",
    advertised="layouts",
    expiry="write_failed",
    write_done_to="targets",
    reaper="read_only",
    completion="all_writers",
    write_failed_heard="understood",
    match_read="if_do_remote_prefill",
    read_guard="layouts",
    read_plan="slices_if_unlike",
    read_barrier="step",
    release_to="holders",
    release_port="effective",
)
_REFERENCE = replace(
    _0_33,
    name="reference",
    toy_proxy="toy-proxy 0.27.0",  # the newest that sends no request to a DP rank that isn't there
    peer_tp="true_size",
    transfer_id_missing="key_error",
    leg_error="request_refused",
    unsupported="request_refused",
    cache_layouts="any",
    latents="latent",
    unfit_start="starts",
    ports="dp_times_tp_plus_tp",
    stage_ports="apart",
    notify_ports="dp_times_tp_plus_tp",
    blocks_ready_width="true_size",
    blocks_ready_gate="none",
    slice_heads="of_layer",
    blocks_ready_again="ignored",
    sealing="every_layer",
    write_failure="write_failed",
    write_failure_in_forward="ends_transfer",
    decode_timer="recv_abort_timeout",
    abort_waiting="freed",
    late_report="ignored",
    decode_leg_hold="freed",
    windows="prompt_tail",
    block_ids="either",
    read_map="gather",
    read_handshake="eager_bounded",
    read_guard="none",
    read_plan="head_slices",
    read_pairing="by_position",
    read_barrier="step_or_fail",
    failed_blocks="any",
    failed_states="as_others",
)

RELEASES: dict[str, ConnectorRelease] = {
    record.name: record for record in (_0_24, _0_25, _0_26, _0_27, _0_28, _0_29, _0_30, _0_31, _0_32, _0_33, _REFERENCE)
}
REFERENCE = _REFERENCE.name
PUBLISHED = tuple(name for name in RELEASES if name != REFERENCE)
"""The releases of vLLM, the oldest first."""
NEWEST = PUBLISHED[-1]
# Patch releases whose connector files are the same as another's.
ALIASES = {"0.25.0": "0.25.1", "0.27.1": "0.27.0"}


def get_release(name: str, place: str = "release") -> ConnectorRelease:
    """The record of a release; raises InputError with the nearest name."""
    record = RELEASES.get(ALIASES.get(name, name))
    if record is None:
        raise InputError(place, f"no release {short(name)}", nearest(name, [*RELEASES, *ALIASES]))
    return record
