"""Every subject in which releases of the connector differ: one registry, field → its policies → meaning and pure function.

A `ConnectorRelease` names one policy a field; protocol code calls what the name resolves to and never asks which
version it is. A field decides one subject. `decides` are the kinds of event (`kvcover.sim.kernel.events`) in which two of its
policies can first be told apart; a test exchanges every policy and looks. Sources: the released files of vLLM
0.24.0–0.33.0, rows of `tests/data/measured.toml`, and the public reports named in the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvcover.sim.releases.blocks import (
    last_of_both,
    last_of_prompt,
    layouts_and_packed,
    layouts_any,
    layouts_split_interleaved,
    layouts_standard,
    pair_equal,
    pair_head,
    read_pair_by_position,
    read_pair_exact,
    read_pair_head,
    read_pair_remote_tail_as_local,
    read_pair_suffix,
)
from kvcover.sim.releases.maps import (
    acks_any,
    acks_fan_in,
    done_own_rank,
    done_targets,
    guard_layouts,
    guard_none,
    guard_replicated,
    map_fan,
    map_floor,
    map_own,
    read_gather,
    release_holders,
    release_own_rank,
    release_sources,
)
from kvcover.sim.releases.ports import (
    dp_plus_tp,
    dp_times_tp_plus_tp,
    gate_leader_override_master,
    gate_open,
    release_at_effective,
    release_at_raw,
    release_at_tp,
)
from kvcover.sim.releases.sizes import (
    keep,
    non_positive_is_own,
    own_size,
    remote_tp_size_or_tp_size_or_0,
    remote_tp_size_or_tp_size_or_own,
    tp_size_or_1,
    true_size,
    zero_is_own,
)


class Policy(msgspec.Struct, frozen=True):
    """One way to do something: what it means, and the function that does it (None when the name says it all)."""

    text: str
    call: Callable[..., Any] | None = None


class Field(msgspec.Struct, frozen=True):
    """One subject: the kinds of event that it decides, and its policies by name."""

    decides: tuple[str, ...]
    policies: dict[str, Policy]


FIELDS: dict[str, Field] = {
    # -- what is read from a leg ---------------------------------------------------------------------------------
    "peer_tp": Field(("dialled", "dial_dead", "map_refused", "crashed", "told", "wrote", "release_sent"), {
        "tp_size_or_1": Policy("`tp_size`, default 1; `remote_tp_size` is not read (vllm#46332)", tp_size_or_1),
        "remote_tp_size_or_tp_size_or_0": Policy(
            "`remote_tp_size`, else `tp_size`, else 0 = unknown (vllm#47764)", remote_tp_size_or_tp_size_or_0
        ),
        "true_size": Policy("the size that the peer itself has", true_size),
    }),
    "unknown_tp_map": Field(("dialled", "dial_dead", "map_refused", "crashed"), {
        "refused": Policy("the rank map refuses a size of 0 or less", keep),
        "zero_is_own": Policy("0 counts as our own size in the rank map (vllm#47764)", zero_is_own),
        "non_positive_is_own": Policy("0 or less counts as our own size (a draft of vllm#47764)", non_positive_is_own),
    }),
    "unknown_tp_guard": Field(("crashed",), {
        "refused": Policy("the KV-head guard refuses a size of 0 or less", keep),
        "zero_is_own": Policy("0 counts as our own size in the KV-head guard (vllm#47764)", zero_is_own),
        "non_positive_is_own": Policy("0 or less counts as our own size (a draft of vllm#47764)", non_positive_is_own),
    }),
    "unknown_tp_states_read": Field(("crashed",), {
        "refused": Policy("READ of recurrent states compares the size as it was read, and so refuses 0 (`_mamba_tp_ratio`, 0.31, 0.32)", keep),
        "zero_is_own": Policy("0 counts as our own size in READ of recurrent states (`or self.world_size` in `_read_blocks`, 0.33.0)", zero_is_own),
    }),
    "unknown_tp_states_write": Field(("task_failed",), {
        "refused": Policy("WRITE of recurrent states compares the size as it was read, and so refuses 0 (`_mamba_tp_ratio`, 0.33.0)", keep),
        "zero_is_own": Policy("0 counts as our own size in WRITE of recurrent states too (no release)", zero_is_own),
    }),
    "transfer_id_missing": Field(("crashed", "refused", "released"), {
        "key_error": Policy("a missing `transfer_id` raises KeyError in the engine that reads it"),
        "synthesised": Policy("each engine makes up an id of its own, so that they differ; its scheduler takes an empty one for missing (0.28+)"),
    }),
    "null_id": Field(("released",), {
        "matched": Policy("prefill matches a transfer whose id is null to its request (0.24.0, measured)"),
        "unmatched": Policy("since acks are counted, a null id is nobody's, and the rank reports nothing (0.25+, measured)"),
    }),
    "address": Field(("dialled", "dial_dead", "blocks_ready_sent"), {
        "params_first": Policy("peer address from the params if complete, else from the request id"),
        "request_id_first": Policy("peer address from the request id, else from the params"),
    }),
    "prefill_leg_read": Field(("crashed", "refused"), {
        "both_modes": Policy("prefill parses its whole leg in READ too, so that a missing key is an error there"),
        "write_only": Policy("in READ prefill does not parse the peer's part of its leg (0.31+)"),
    }),
    "leg_error": Field(("crashed", "refused"), {
        "engine_dies": Policy("what reading a leg raises ends the engine (all releases)"),
        "request_refused": Policy("what reading a leg raises refuses that request"),
    }),
    "unsupported": Field(("refused",), {
        "not_checked": Policy("nobody looks at a pair of engines before something moves (all releases)"),
        "request_refused": Policy("both engines refuse the requests of a pair that can't be served, before anything moves"),
    }),
    # -- what an engine starts with ------------------------------------------------------------------------------
    "cache_layouts": Field(("crashed",), {
        "split_interleaved": Policy("takes K/V split or interleaved, and latents without a head axis", layouts_split_interleaved),
        "and_packed": Policy("as before, and K/V packed into one content (0.26+)", layouts_and_packed),
        "standard": Policy("takes K/V as before, and latents only with a head axis, [B, H, N, C] (0.29+)", layouts_standard),
        "any": Policy("takes a cache in whatever order its axes are", layouts_any),
    }),
    "latents": Field(("crashed",), {
        "latent": Policy("this vLLM lays latents out without a head axis, [blocks, tokens, latent], unless the scenario says otherwise"),
        "standard": Policy("this vLLM lays latents out with a head axis, [blocks, 1, tokens, latent] (0.29+)"),
    }),
    "hybrid_manager": Field(("allocated", "crashed", "leg_sent", "refused"), {
        "off": Policy("vLLM turns its hybrid KV cache manager off: sliding-window layers are kept and sent like all others, and a model with recurrent states does not start"),
        "on": Policy("sliding-window layers have block tables of their own, with which WRITE does not start (0.30+)"),
    }),
    "mixed_layers": Field(("crashed",), {
        "any": Policy("layers may differ in what a block of them holds"),
        "hybrid_off": Policy("an engine whose layers differ so starts only without the hybrid KV cache manager (0.30-0.32)"),
    }),
    "states": Field(("crashed", "refused"), {
        "refused": Policy("a model with recurrent states does not start (0.30)"),
        "read": Policy("READ moves recurrent states at equal TP; WRITE does not start (0.31, 0.32)"),
        "read_write": Policy("READ at equal TP; WRITE slices or gathers states, and every rank writes its own (0.33.0)"),
    }),
    "unfit_start": Field(("crashed",), {
        "raises": Policy("an engine whose model the connector can't serve in its mode does not start (all releases)"),
        "starts": Policy("it starts, and what can't be served is judged by request"),
    }),
    # -- ports ---------------------------------------------------------------------------------------------------
    "ports": Field(("bound", "bind_failed"), {
        "dp_plus_tp": Policy("rank (dp, tp) binds base + dp + tp, so DP and TP together collide (vllm#52014)", dp_plus_tp),
        "dp_times_tp_plus_tp": Policy("rank (dp, tp) binds base + dp × TP + tp", dp_times_tp_plus_tp),
    }),
    "stage_ports": Field(("bound", "bind_failed"), {
        "shared": Policy("every pipeline stage of a rank binds the rank's ports (all releases, measured by hand)"),
        "apart": Policy("each stage has ports of its own; those of the first are modelled"),
    }),
    "pod_ports": Field(("bound", "bind_failed"), {
        "over_all_pods": Policy("dp in the ports of a rank counts over all pods (up to 0.27)"),
        "in_pod": Policy("dp in the ports of a rank counts inside its pod (0.28+)"),
    }),
    "dial": Field(("dialled", "dial_dead"), {
        "dp_plus_tp": Policy("dials base + dp + tp", dp_plus_tp),
        "dp_times_tp_plus_tp": Policy("dials base + dp × (peer TP as read) + tp; an unknown size erases dp", dp_times_tp_plus_tp),
    }),
    "notify_ports": Field(("blocks_ready_sent", "release_sent", "write_done_sent", "write_failed_sent"), {
        "dp_plus_tp": Policy("in WRITE messages go to base + dp + tp (all releases)", dp_plus_tp),
        "dp_times_tp_plus_tp": Policy("in WRITE messages go to base + dp × (peer TP, own size if unknown) + tp", dp_times_tp_plus_tp),
    }),
    "pod_routing": Field(("dialled", "dial_dead", "write_done_sent", "write_failed_sent", "crashed"), {
        "none": Policy("prefill knows the peer as one host whose ports count its DP ranks"),
        "worker": Policy("prefill finds pods by `remote_hosts` and `remote_dp_size_local`; the worker keeps only the last ones (vllm#51681)"),
        "task": Policy("prefill finds pods by `remote_hosts` and `remote_dp_size_local`, kept with each write task (0.31+)"),
    }),
    # -- WRITE: what decode's scheduler says ---------------------------------------------------------------------
    "match_write": Field(("blocks_ready_sent", "recompute"), {
        "always": Policy("every request of a WRITE decode engine waits for remote KV, also when it is admitted again"),
        "if_do_remote_prefill": Policy("only a request with `do_remote_prefill` waits for remote KV, and once"),
    }),
    "blocks_ready_width": Field(("blocks_ready_sent", "release_sent"), {
        "own_size": Policy("decode tells as many prefill ranks as it has itself", own_size),
        "remote_tp_size_or_tp_size_or_own": Policy(
            "decode tells as many prefill ranks as its leg says, else as it has itself (0.33.0)",
            remote_tp_size_or_tp_size_or_own,
        ),
        "true_size": Policy("decode tells every prefill rank", true_size),
    }),
    "blocks_ready_gate": Field(("blocks_ready_sent", "release_sent"), {
        "none": Policy("the decode DP rank that has the request tells", gate_open),
        "leader_override_master": Policy(
            "`is_request_leader`, else `remote_dp_rank_override`, else only the first pod tells (0.28+)",
            gate_leader_override_master,
        ),
    }),
    "blocks_ready_pods": Field(("blocks_ready_sent",), {
        "one_host": Policy("decode tells its blocks to prefill's one host (up to 0.27)"),
        "by_pod": Policy("to the host and port of prefill's pod, by `remote_hosts` and `remote_dp_size_local` (0.28+)"),
    }),
    "external_zero": Field(("blocks_ready_sent", "release_sent", "blocks_ready", "poisoned"), {
        "full_table": Policy("decode that needs nothing from prefill announces its blocks all the same"),
        "empty_list": Policy("it announces an empty list, which kills prefill's notify threads (0.26-0.32)"),
        "release": Policy("it releases prefill's blocks (0.33.0)"),
    }),
    "early_release_acks": Field(("released",), {
        "one": Policy("the release of a request that needs nothing counts as one consumer"),
        "decode_size": Policy("it counts as decode's TP size, so that prefill waits for acks that nobody sends (0.28-0.32)"),
    }),
    # -- WRITE: what prefill's ranks do --------------------------------------------------------------------------
    "write_map": Field(("dialled", "dial_dead", "map_refused", "crashed", "told", "wrote", "short", "settled", "write_done"), {
        "own_rank": Policy("prefill rank r writes to decode rank r", map_own),
        "floor": Policy("each prefill rank writes whole blocks to one decode rank", map_floor),
        "fan": Policy("each prefill rank writes to every decode rank that needs its heads", map_fan),
    }),
    "write_map_error": Field(("map_refused", "crashed"), {
        "task_fails": Policy("a refused map is logged; the write task fails, the request hangs"),
        "forward_raises": Policy("a refused map raises in prefill's forward: the engine is lost"),
    }),
    "write_plan": Field(("wrote", "task_failed", "transfer_failed", "short", "stray"), {
        "local_strides": Policy("whole blocks, with our own block length also at the peer"),
        "head_slices": Policy("head by head, with the layout that the peer advertised (0.33.0)"),
    }),
    "slice_heads": Field(("wrote", "short"), {
        "of_model": Policy("how many heads WRITE moves one by one is counted from the model as a whole, whatever the layer has (0.33.0)"),
        "of_layer": Policy("at equal TP all heads of the layer are moved"),
    }),
    "advertised": Field(("crashed", "task_failed", "wrote", "read", "short", "stray"), {
        "regions": Policy("a handshake tells where memory is, and nothing of what lies in it"),
        "layouts": Policy("a handshake tells tokens a block and, of a K/V cache, its layout (0.33.0)"),
    }),
    "write_pairing": Field(("task_failed",), {
        "equal": Policy("block lists of equal length only", pair_equal),
        "head": Policy("a shorter local list is written to the head of the remote one", pair_head),
    }),
    "write_clamp": Field(("task_failed", "wrote"), {
        "none": Policy("prefill writes its whole block list"),
        "prompt_blocks": Policy("prefill writes no more blocks than the prompt has (0.32+)"),
    }),
    "last_chunk": Field(("wrote", "dialled"), {
        "by_blocks": Policy("a chunk is the last when the blocks hold the prompt: too early with lookahead blocks"),
        "by_tokens": Policy("a chunk is the last when its tokens complete the prompt (0.32+)"),
    }),
    "plain_chunks": Field(("crashed",), {
        "key_error": Policy("a request without params whose prompt takes several steps kills a WRITE prefill scheduler"),
        "skipped": Policy("such a request is none of the connector's business (0.28+)"),
    }),
    "blocks_ready_again": Field(("blocks_ready_again",), {
        "starts_over": Policy("decode's blocks, told a second time, start the count of writes anew, so that it never ends"),
        "ignored": Policy("decode's blocks, told a second time, are ignored"),
    }),
    "sealing": Field(("sealed_short", "released"), {
        "scheduled_tasks": Policy("a transfer is as many writes as the forward scheduled, all layers or not (vllm#46290)"),
        "every_layer": Policy("a transfer is a write of every layer; with fewer it failed"),
    }),
    "write_wait": Field(("released", "settled"), {
        "all_statuses": Policy("a failed write is noticed when all writes of the transfer are over"),
        "first_failure": Policy("the first failed write ends the transfer, others may still be under way (0.31+)"),
    }),
    "write_failure": Field(("write_failed_sent",), {
        "silent": Policy("a failed write ends the transfer at prefill, and decode is told nothing (all releases)"),
        "write_failed": Policy("a failed write ends the transfer and decode is told"),
    }),
    "write_failure_in_forward": Field(("crashed",), {
        "raises": Policy("a failed write that the forward finds at its end raises there: the engine is lost (all releases)"),
        "ends_transfer": Policy("it ends the transfer, as any other"),
    }),
    "expiry": Field(("write_failed_sent",), {
        "silent": Policy("prefill frees its blocks when decode's never arrive, decode is told nothing"),
        "write_failed": Policy("prefill frees its blocks and tells decode (0.33.0)"),
    }),
    "write_done_to": Field(("write_done_sent",), {
        "own_rank": Policy("write-done goes to the decode rank of our own number", done_own_rank),
        "targets": Policy("write-done goes to every decode rank written", done_targets),
    }),
    "reaper": Field(("reaped",), {
        "both_modes": Policy("prefill's scheduler frees unacknowledged blocks after the defer timeout"),
        "read_only": Policy("as before in READ; in WRITE it waits for the ranks without limit (0.33.0)"),
    }),
    "early_ack": Field(("crashed",), {
        "crash": Policy("a finished-sending report for a request that prefill does not hold kills its scheduler"),
        "parked": Policy("such a report is parked, then dropped (0.28+)"),
    }),
    # -- WRITE: what decode's ranks make of it -------------------------------------------------------------------
    "completion": Field(("told", "write_done"), {
        "first_message": Policy("a decode rank is complete at the first write-done"),
        "all_writers": Policy("a decode rank is complete when all its writers said so"),
    }),
    "write_failed_heard": Field(("poisoned", "told_failed"), {
        "unknown": Policy("`write_failed` is a message that a decode rank does not know and that ends its notify thread (up to 0.32)"),
        "understood": Policy("`write_failed` fails the request (0.33.0)"),
    }),
    "decode_timer": Field(("request_failed", "load_failed", "freed"), {
        "none": Policy("decode waits in WRITE without limit"),
        "recv_abort_timeout": Policy("decode fails a request whose blocks do not come within the receive limit"),
    }),
    "abort_waiting": Field(("freed", "told"), {
        "leak": Policy("blocks of a request aborted while waiting are never matched again"),
        "freed": Policy("blocks of a request aborted while waiting are freed when nothing can be written any more"),
    }),
    "late_report": Field(("crashed",), {
        "crash": Policy("a transfer reported finished whose request does not wait for it kills decode's scheduler"),
        "ignored": Policy("such a report is ignored"),
    }),
    "decode_leg_hold": Field(("freed", "reaped"), {
        "reaped": Policy("what decode has of a request whose leg says `do_remote_decode` is held as if another were to read it, until the deferral timer (up to 0.27)"),
        "for_ever": Policy("it is held, and nothing ends that, as decode has no such timer (0.28+)"),
        "freed": Policy("decode frees its blocks, whatever its leg says of a remote decode"),
    }),
    # -- READ: what prefill answers ------------------------------------------------------------------------------
    "answer_blocks": Field(("leg_sent",), {
        "flat": Policy("prefill answers a list of block ids (up to 0.29)"),
        "groups": Policy("prefill answers a list of block ids a cache group (0.30+)"),
    }),
    "answer_dp": Field(("leg_sent",), {
        "none": Policy("prefill's answer does not say which DP rank the request ran on (up to 0.27)"),
        "rank": Policy("it says the DP rank, `remote_dp_rank_override` and `remote_dp_size_local` (0.28+)"),
    }),
    "windows": Field(("read", "leg_sent", "crashed", "short"), {
        "table_tail": Policy("of a sliding window's table the last ceil(window / block size) + 1 blocks are exchanged (0.30+)", last_of_both),
        "prompt_tail": Policy("as table_tail, counted from the prompt's end and not from the table's", last_of_prompt),
    }),
    # -- READ: what decode does ----------------------------------------------------------------------------------
    "match_read": Field(("recompute",), {
        "always": Policy("every request of a READ decode engine counts its prompt as loaded, also when it is admitted again"),
        "if_do_remote_prefill": Policy("only a request with `do_remote_prefill` does, and once"),
    }),
    "external_zero_read": Field(("read", "crashed", "told", "dialled", "recompute", "settled"), {
        "full_table": Policy("decode that needs nothing from prefill reads into all its blocks all the same (0.24, 0.25)"),
        "nothing": Policy("it reads nothing: `num_external_tokens > 0` is asked first (0.26+)"),
    }),
    "abort_before_read": Field(("crashed", "release_sent"), {
        "raises": Policy("an abort before decode allocated is a read of some blocks into none, which raises (0.24, 0.25)"),
        "release": Policy("it releases prefill's blocks (0.26+)"),
    }),
    "empty_read": Field(("dialled", "dial_dead", "stalled", "put_off", "recompute"), {
        "empty_batch": Policy("a read of nothing is an empty batch, which needs a session"),
        "release": Policy("a read of nothing is only a release (0.31+)"),
    }),
    "block_ids": Field(("crashed",), {
        "flat": Policy("decode counts the list of block ids that it gets (up to 0.29)"),
        "groups": Policy("decode takes what it gets for a list of block ids a cache group (0.30+)"),
        "either": Policy("decode takes block ids with or without groups"),
    }),
    "block_bounds": Field(("crashed",), {
        "region": Policy("a block id is good as long as its bytes lie in the registered memory"),
        "pool": Policy("a block id beyond the pool is refused (0.31+)"),
    }),
    "read_map": Field(("dialled", "dial_dead", "crashed", "release_sent"), {
        "own_rank": Policy("decode rank r reads from prefill rank r", map_own),
        "floor": Policy("each decode rank reads from one prefill rank", map_floor),
        "gather": Policy("each decode rank reads from every prefill rank that holds its heads", read_gather),
    }),
    "read_flex": Field(("dialled", "dial_dead"), {
        "none": Policy("the source is fixed"),
        "mla_tp1": Policy("a decode engine of TP 1 with MLA goes round the prefill ranks"),
    }),
    "read_dp": Field(("read", "crashed", "release_sent"), {
        "zero": Policy("reads from prefill DP rank 0, and releases it"),
        "param": Policy("reads from the prefill DP rank that `remote_dp_rank` names, and releases it"),
    }),
    "read_handshake": Field(("dialled", "stalled", "put_off", "crashed", "freed"), {
        "lazy": Policy("handshakes while loading, and goes on without after the timeout"),
        "eager_vote": Policy("handshakes with every prefill rank first; all ranks vote, without a limit"),
        "eager_bounded": Policy("as `eager_vote`, but a port that nobody binds within the transfer timeout fails the request"),
    }),
    "read_queue": Field(("put_off",), {
        "one_a_step": Policy("a step that dials while loading reads for one request alone (up to 0.26)"),
        "all": Policy("it reads for all its requests"),
    }),
    "read_guard": Field(("crashed",), {
        "none": Policy("no check of the KV heads", guard_none),
        "replicated_heads": Policy("unequal TP only with replicated heads or MLA", guard_replicated),
        "layouts": Policy("as `replicated_heads`, and heads a rank must be equal", guard_layouts),
    }),
    "read_plan": Field(("read", "transfer_failed", "crashed", "short"), {
        "local_strides": Policy("whole blocks, with our own block length also at the peer"),
        "slices_if_unlike": Policy("as before, but head by head where prefill advertised another layout than ours (0.33.0)"),
        "head_slices": Policy("head by head, with prefill's own layout"),
    }),
    "read_pairing": Field(("read", "crashed", "stray", "short", "told"), {
        "exact": Policy("equal lists only", read_pair_exact),
        "remote_tail_as_local": Policy("a shorter local list becomes the tail of the remote one", read_pair_remote_tail_as_local),
        "head": Policy("a shorter local list takes the head of the remote one", read_pair_head),
        "suffix": Policy("a shorter local list takes the tail of the remote one", read_pair_suffix),
        "by_position": Policy("block i of the prompt with block i of the prompt", read_pair_by_position),
    }),
    "sq_retry": Field(("transfer_failed",), {
        "none": Policy("a full send queue fails the transfer"),
        "read": Policy("a full send queue is tried again in READ; in WRITE it fails the transfer (0.26+)"),
    }),
    "read_barrier": Field(("go", "crashed", "request_failed", "short", "freed", "settled"), {
        "none": Policy("a layer is used whether it landed or not"),
        "per_layer": Policy("each layer waits for its own read, but not under full CUDA graphs (vllm#48534)"),
        "per_layer_or_step": Policy("as per_layer; under full CUDA graphs the forward waits for all reads (0.31+)"),
        "step": Policy("the forward starts when every read of the step landed, and raises if one takes too long (0.33.0)"),
        "step_or_fail": Policy("as step, but a read that takes too long fails its request"),
    }),
    "read_failure": Field(("request_failed", "load_failed", "crashed", "go", "release_sent"), {
        "garbage": Policy("a failed read is logged and decode goes on"),
        "load_errors": Policy("a failed read is reported and the request fails (0.31+)"),
    }),
    "failed_blocks": Field(("crashed",), {
        "one_table": Policy("a reported failure kills a decode engine whose model has several block tables: its scheduler takes failed blocks of one (0.31+)"),
        "any": Policy("a reported failure fails its request"),
    }),
    "failed_states": Field(("crashed", "release_sent"), {
        "raises": Policy("a failed read of a model with recurrent states raises in the step (0.31+, measured)"),
        "as_others": Policy("it is reported as that of any other model"),
    }),
    "read_done": Field(("told", "release_sent", "settled"), {
        "last_layer": Policy("the read counts as done with its last layer"),
        "all_layers": Policy("the read is done with all its layers"),
    }),
    "recv_abort": Field(("told", "release_sent", "settled"), {
        "none": Policy("decode waits for a read without limit"),
        "silent": Policy("decode drops a read after the receive limit and tells prefill nothing (0.28+)"),
    }),
    "release_to": Field(("release_sent",), {
        "own_rank": Policy("decode rank r releases prefill rank r", release_own_rank),
        "sources": Policy("each decode rank releases the rank that it read", release_sources),
        "holders": Policy("each decode rank releases every prefill rank that holds blocks for it", release_holders),
    }),
    "release_port": Field(("release_sent",), {
        "tp": Policy("at base + tp, so DP rank 0", release_at_tp),
        "raw": Policy("at base + dp × (peer TP as read) + tp", release_at_raw),
        "effective": Policy("at base + dp × (peer TP, own size if unknown) + tp", release_at_effective),
    }),
    "release_acks": Field(("released",), {
        "one": Policy("a release names no TP size and counts as one consumer (0.24.0)"),
        "decode_size": Policy("a release names decode's TP size, `consumer_tp_size` (0.25+)"),
    }),
    "acks": Field(("released",), {
        "any": Policy("the first release completes a prefill rank", acks_any),
        "fan_in": Policy("a prefill rank waits for decode TP / prefill TP releases", acks_fan_in),
    }),
}  # fmt: skip
