"""Every rule in which releases of the connector differ: one registry, field → name → meaning and pure function.

A `ConnectorRelease` names one policy a field; protocol code calls what the name resolves to and never asks which
version it is. Sources: the released files of vLLM 0.24.0–0.33.0, and the public reports named in the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvcover.sim.cache.geometry import CacheShape, Geometry, check_slices
from kvcover.sim.errors import PeerRefusal

Params = Mapping[str, Any]
MOST_RANKS = 65536  # as there are ports
MOST_HEADS = 65536


class Policy(msgspec.Struct, frozen=True):
    """One way to do something: what it means, and the function that does it (None when the name says it all)."""

    text: str
    call: Callable[..., Any] | None = None


class Target(msgspec.Struct, frozen=True):
    """What one prefill rank gives to decode rank `tp_rank`: local heads [local, local+count) into slot `remote`.

    `writers` prefill ranks give something to that decode rank, each sends one write-done.
    """

    tp_rank: int
    local: int
    remote: int
    count: int
    writers: int = 1


# -- peer TP size ------------------------------------------------------------------------------------------------


def tp_size_or_1(params: Params, own: int, truth: int) -> Any:
    return params.get("tp_size", 1)


def remote_tp_size_or_tp_size_or_0(params: Params, own: int, truth: int) -> Any:
    return as_int(params.get("remote_tp_size") or params.get("tp_size") or 0)


def true_size(params: Params, own: int, truth: int) -> Any:
    return truth


def remote_tp_size_or_tp_size_or_own(params: Params, own: int, truth: int) -> int:
    return as_int(params.get("remote_tp_size") or params.get("tp_size") or own)


def own_size(params: Params, own: int, truth: int) -> int:
    return own


def as_int(value: Any) -> int:
    """Python's int(), with its error as the connector's."""
    try:
        return int(value)
    except TypeError as error:
        raise PeerRefusal("TypeError", f"int({value!r}): {error}") from None
    except (ValueError, OverflowError) as error:
        raise PeerRefusal("ValueError", f"int({value!r}): {error}") from None


def keep(size: int, own: int) -> int:
    return size


def zero_is_own(size: int, own: int) -> int:
    return own if size == 0 else size


def non_positive_is_own(size: int, own: int) -> int:
    return own if size <= 0 else size


# -- rank maps ---------------------------------------------------------------------------------------------------


def floor_rank(rank: int, own: int, peer: int) -> int:
    """The one peer rank of `rank` of `own` ranks among `peer` ranks (vllm#46332)."""
    if peer <= 0:
        raise PeerRefusal("ValueError", f"peer TP size must be positive, not {peer}")
    if peer >= own:
        if peer % own:
            raise PeerRefusal("ValueError", f"peer TP size {peer} is not a multiple of {own}")
        return rank * (peer // own)
    if own % peer:
        raise PeerRefusal("ValueError", f"TP size {own} is not a multiple of the peer's {peer}")
    return rank // (own // peer)


def map_own(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    return [Target(rank, 0, 0, geometry.heads_per_rank(own))]


def map_floor(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    return [Target(floor_rank(rank, own, peer), 0, 0, geometry.heads_per_rank(own))]


def _check_pair(a: int, b: int, geometry: Geometry) -> None:
    larger, smaller = max(a, b), min(a, b)
    if smaller <= 0:
        raise PeerRefusal("ValueError", "TP sizes must be positive")
    if larger % smaller:
        raise PeerRefusal("ValueError", f"one of TP sizes {a} and {b} must be a multiple of the other")
    if a != b:
        for size in (a, b):
            geometry.heads_of(0, size)


def map_fan(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    """Fan out to every peer rank that needs part of ours, or fan in with our neighbours (0.33.0, protocol of WRITE).

    Where several ranks hold the same head or latent, only the first of the group writes it (a `count` of 0 to the others, if
    there are recurrent states, which all of them write).
    """
    _check_pair(own, peer, geometry)
    if peer > MOST_RANKS:
        raise PeerRefusal("MemoryError", f"a map onto {peer} ranks")
    mine = geometry.heads_of(rank, own)
    if peer >= own:
        spread = peer // own
        return [
            Target(t, geometry.heads_of(t, peer).start - mine.start, 0, geometry.heads_per_rank(peer))
            for t in range(rank * spread, (rank + 1) * spread)
        ]
    group = own // peer
    target = rank // group
    starts = [geometry.heads_of(p, own).start for p in range(target * group, (target + 1) * group)]
    first = starts.index(mine.start) == rank - target * group
    if not first and not geometry.has_states:
        return []
    slot = mine.start - geometry.heads_of(target, peer).start
    writers = group if geometry.has_states else len(set(starts))
    return [Target(target, 0, slot, len(mine) if first else 0, writers)]


def read_gather(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    """The mirror of `map_fan` seen from decode: every prefill rank that holds a part first. Only in `reference`.

    In the result `local` is the slot of the decode rank and `remote` the head slot at the prefill rank.
    """
    _check_pair(own, peer, geometry)
    sources = range(rank * peer // own, max(rank * peer // own + 1, (rank + 1) * peer // own))
    return [
        Target(source, target.remote, target.local, target.count)
        for source in sources
        for target in map_fan(source, peer, own, geometry)
        if target.tp_rank == rank
    ]


# -- ports -------------------------------------------------------------------------------------------------------


def dp_plus_tp(dp: int, tp: int, tp_size: int) -> int:
    return dp + tp


def dp_times_tp_plus_tp(dp: int, tp: int, tp_size: int) -> int:
    return dp * tp_size + tp


def fold(dp: int, local: int) -> int:
    """The number of a DP rank inside its pod; `local` ranks a pod, 0 when there is one pod."""
    return dp % local if local else dp


# -- who is told -------------------------------------------------------------------------------------------------


def done_own_rank(rank: int, targets: list[Target]) -> list[int]:
    return [rank]


def done_targets(rank: int, targets: list[Target]) -> list[int]:
    return [target.tp_rank for target in targets]


def gate_open(params: Params, dp: int, pod: int) -> bool:
    return True


def gate_leader_override_master(params: Params, dp: int, pod: int) -> bool:
    """Which decode DP rank announces its blocks (0.28+): leader flag, else pinned rank, else the first pod."""
    leader = params.get("is_request_leader")
    if leader is not None:
        return bool(leader)
    if params.get("remote_dp_rank_override"):
        return bool(dp == params.get("remote_dp_rank", 0))
    return pod == 0


def release_own_rank(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    return [rank]


def release_sources(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    return sources


def release_holders(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    """All prefill ranks that hold blocks for this decode rank, read or not (0.33.0)."""
    if peer == own:
        return sources
    if peer < own:
        return [floor_rank(rank, own, peer)]
    first = floor_rank(rank, own, peer)
    return list(range(first, first + peer // own))


def acks_any(own: int, consumer: int) -> int:
    return 1


def acks_fan_in(own: int, consumer: int) -> int:
    """How many releases a prefill rank waits for (vllm#46332)."""
    if consumer <= own:
        return 1
    if consumer % own:
        raise PeerRefusal("ValueError", f"consumer TP size {consumer} is not a multiple of {own}")
    return consumer // own


# -- guards and pairing ------------------------------------------------------------------------------------------


def guard_none(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    return None


def guard_replicated(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    """Unequal TP only when every rank of both sides holds one replicated head, or the latent (vllm#46332)."""
    if own <= 0 or peer <= 0:
        raise PeerRefusal("ValueError", f"TP sizes must be positive, not {own} and {peer}")
    if geometry.mla or own == peer or min(own, peer) >= geometry.kv_heads:
        return
    raise PeerRefusal(
        "NotImplementedError", f"unequal TP ({own} and {peer}) with {geometry.kv_heads} KV heads that are not replicated"
    )


def guard_layouts(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    """First the layouts that both sides advertised, then, if they are equal, `guard_replicated` (0.33.0).

    The layout of a split cache names the start of its V plane and so the pool size: with unequal pools only what head
    slices need is compared. A peer of an older release advertises none.
    """
    if advertised is None or mine.advertised == advertised.advertised:
        guard_replicated(own, peer, mine, advertised, geometry)
        return
    if mine.heads != advertised.heads:
        raise PeerRefusal("MoRIIOError", f"{mine.heads} heads a rank here, {advertised.heads} at the peer")
    check_slices(mine, advertised)


def layouts_split_interleaved(layout: str, mla: bool) -> bool:
    return layout in ("latent", "split", "interleaved")


def layouts_and_packed(layout: str, mla: bool) -> bool:
    return layouts_split_interleaved(layout, mla) or not mla


def layouts_standard(layout: str, mla: bool) -> bool:
    return layout != "latent"


def layouts_any(layout: str, mla: bool) -> bool:
    return True


def pair_equal(local: list[int], remote: list[int]) -> list[tuple[int, int]]:
    if len(local) != len(remote):
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and {len(remote)} remote blocks")
    return list(zip(local, remote, strict=True))


def pair_head(local: list[int], remote: list[int]) -> list[tuple[int, int]]:
    """First with first; the rest of a longer remote list stays unwritten (0.26+)."""
    if len(local) > len(remote):
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and only {len(remote)} remote blocks")
    return list(zip(local, remote, strict=False))


def read_pair_exact(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    return pair_equal(local, remote)


def read_pair_remote_tail_as_local(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is *replaced* by the tail of the remote one: foreign blocks are overwritten (vllm#48471)."""
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    if len(local) < len(remote):
        local = remote[-len(local) :]
    return list(zip(local, remote, strict=False))


def read_pair_head(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is paired with the head of the remote one: shifted by the prefix (0.30)."""
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    return list(zip(local, remote, strict=False))


def read_pair_suffix(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is the suffix that the prefix cache lacks; one lookahead block too many is cut (0.31+)."""
    if len(local) > len(remote) + 1:
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and only {len(remote)} remote blocks")
    local = local[: len(remote)]
    return list(zip(local, remote[len(remote) - len(local) :], strict=True))


def read_pair_by_position(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """Block i of the prompt with block i of the prompt; `skipped` blocks at its start are not asked for."""
    return list(zip(local, remote[skipped:], strict=False))


def last_of_both(local: list[int], remote: list[int], kept: int, prompt: int) -> tuple[list[int], list[int]]:
    """Each engine counts the kept blocks from the end of its own table: lookahead blocks shift them (0.30+)."""
    return local[-kept:], remote


def last_of_prompt(local: list[int], remote: list[int], kept: int, prompt: int) -> tuple[list[int], list[int]]:
    """Both count from the end of the prompt, of which decode's table has `prompt` blocks."""
    count = min(kept, len(remote), prompt)
    return local[prompt - count : prompt], remote[len(remote) - count :]


POLICIES: dict[str, dict[str, Policy]] = {
    "peer_tp": {
        "tp_size_or_1": Policy("`tp_size`, default 1; `remote_tp_size` is not read (vllm#46332)", tp_size_or_1),
        "remote_tp_size_or_tp_size_or_0": Policy(
            "`remote_tp_size`, else `tp_size`, else 0 = unknown (vllm#47764)", remote_tp_size_or_tp_size_or_0
        ),
        "true_size": Policy("the size that the peer itself has", true_size),
    },
    "unknown_tp_map": {
        "refused": Policy("the rank map refuses a size of 0 or less", keep),
        "zero_is_own": Policy("0 counts as our own size in the rank map (vllm#47764)", zero_is_own),
        "non_positive_is_own": Policy("0 or less counts as our own size (a draft of vllm#47764)", non_positive_is_own),
    },
    "unknown_tp_guard": {
        "refused": Policy("the KV-head guard refuses a size of 0 or less", keep),
        "zero_is_own": Policy("0 counts as our own size in the KV-head guard (vllm#47764)", zero_is_own),
        "non_positive_is_own": Policy("0 or less counts as our own size (a draft of vllm#47764)", non_positive_is_own),
    },
    "write_map": {
        "own_rank": Policy("prefill rank r writes to decode rank r", map_own),
        "floor": Policy("each prefill rank writes whole blocks to one decode rank", map_floor),
        "fan": Policy("each prefill rank writes to every decode rank that needs its heads", map_fan),
    },
    "write_map_error": {
        "task_fails": Policy("a refused map is logged; the write task fails, the request hangs"),
        "forward_raises": Policy("a refused map raises in prefill's forward: the engine is lost"),
    },
    "unsupported": {
        "not_checked": Policy("nobody looks at a pair of sizes, or at a leg, before something moves"),
        "request_refused": Policy("both engines refuse a request that they can't serve before anything moves"),
    },
    "write_plan": {
        "local_strides": Policy("whole blocks, with our own block length also at the peer"),
        "head_slices": Policy("head by head, with the layout that the peer advertised (0.33.0)"),
    },
    "cache_layouts": {
        "split_interleaved": Policy("takes K/V split or interleaved, and latents without a head axis", layouts_split_interleaved),
        "and_packed": Policy("as before, and K/V packed into one content (0.26+)", layouts_and_packed),
        "standard": Policy("takes K/V as before, and latents only with a head axis, [B, H, N, C] (0.29+)", layouts_standard),
        "any": Policy("takes a cache in whatever order its axes are", layouts_any),
    },
    "block_bounds": {
        "region": Policy("a block id is good as long as its bytes lie in the registered memory"),
        "pool": Policy("a block id beyond the pool is refused (0.31+)"),
    },
    "write_pairing": {
        "equal": Policy("block lists of equal length only", pair_equal),
        "head": Policy("a shorter local list is written to the head of the remote one", pair_head),
    },
    "ports": {
        "dp_plus_tp": Policy("rank (dp, tp) binds base + dp + tp, so DP and TP together collide", dp_plus_tp),
        "dp_times_tp_plus_tp": Policy("rank (dp, tp) binds base + dp × TP + tp", dp_times_tp_plus_tp),
    },
    "dial": {
        "dp_plus_tp": Policy("dials base + dp + tp", dp_plus_tp),
        "dp_times_tp_plus_tp": Policy("dials base + dp × (peer TP as read) + tp; an unknown size erases dp", dp_times_tp_plus_tp),
    },
    "address": {
        "params_first": Policy("peer address from the params if complete, else from the request id"),
        "request_id_first": Policy("peer address from the request id, else from the params"),
    },
    "blocks_ready_width": {
        "own_size": Policy("decode tells as many prefill ranks as it has itself", own_size),
        "remote_tp_size_or_tp_size_or_own": Policy(
            "decode tells as many prefill ranks as its leg says, else as it has itself (0.33.0)",
            remote_tp_size_or_tp_size_or_own,
        ),
        "true_size": Policy("decode tells every prefill rank", true_size),
    },
    "blocks_ready_gate": {
        "none": Policy("the decode DP rank that has the request tells", gate_open),
        "leader_override_master": Policy(
            "`is_request_leader`, else `remote_dp_rank_override`, else only the first pod tells (0.28+)",
            gate_leader_override_master,
        ),
    },
    "write_done_to": {
        "own_rank": Policy("write-done goes to the decode rank of our own number", done_own_rank),
        "targets": Policy("write-done goes to every decode rank written", done_targets),
    },
    "completion": {
        "first_message": Policy("a decode rank is complete at the first write-done"),
        "all_writers": Policy("a decode rank is complete when all its writers said so"),
    },
    "expiry": {
        "silent": Policy("prefill frees its blocks when decode's never arrive, decode is told nothing"),
        "write_failed": Policy("prefill frees its blocks and tells decode, which fails the request (0.33.0)"),
    },
    "sealing": {
        "scheduled_tasks": Policy("a transfer is as many writes as the forward scheduled, all layers or not (vllm#46290)"),
        "every_layer": Policy("a transfer is a write of every layer; with fewer it failed"),
    },
    "blocks_ready_again": {
        "starts_over": Policy("decode's blocks, told a second time, start the count of writes anew, so that it never ends"),
        "ignored": Policy("decode's blocks, told a second time, are ignored"),
    },
    "write_failure": {
        "silent": Policy("a failed write ends the transfer at prefill and decode is told nothing; found in the forward, it raises"),
        "write_failed": Policy("a failed write ends the transfer and decode is told"),
    },
    "decode_timer": {
        "none": Policy("decode waits in WRITE without limit"),
        "recv_abort_timeout": Policy("decode fails a request whose blocks do not come within the receive limit"),
    },
    "abort_waiting": {
        "leak": Policy("blocks of a request aborted while waiting are never matched again"),
        "freed": Policy("blocks of a request aborted while waiting are freed when nothing can be written any more"),
    },
    "reaper": {
        "both_modes": Policy("prefill's scheduler frees unacknowledged blocks after the defer timeout"),
        "read_only": Policy("as before in READ; in WRITE it waits for the ranks without limit (0.33.0)"),
    },
    "transfer_id_missing": {
        "key_error": Policy("a missing `transfer_id` kills the engine that reads it"),
        "synthesised": Policy("each engine makes up an id of its own, so that they differ"),
        "request_refused": Policy("the request is refused"),
    },
    "match_write": {
        "always": Policy("every request of a WRITE decode engine waits for remote KV"),
        "if_do_remote_prefill": Policy("only a request with `do_remote_prefill` waits for remote KV"),
    },
    "match_read": {
        "always": Policy("every request of a READ decode engine counts its prompt as loaded"),
        "if_do_remote_prefill": Policy("only a request with `do_remote_prefill` does"),
    },
    "prefill_leg_read": {
        "both_modes": Policy("prefill parses its whole leg in READ too, so that a missing key kills it"),
        "write_only": Policy("in READ prefill does not parse the peer's part of its leg (0.31+)"),
    },
    "read_failure": {
        "garbage": Policy("a failed read is logged and decode goes on"),
        "load_errors": Policy("a failed read is reported and the request fails (0.31+)"),
    },
    "read_map": {
        "own_rank": Policy("decode rank r reads from prefill rank r", map_own),
        "floor": Policy("each decode rank reads from one prefill rank", map_floor),
        "gather": Policy("each decode rank reads from every prefill rank that holds its heads", read_gather),
    },
    "read_flex": {
        "none": Policy("the source is fixed"),
        "mla_tp1": Policy("a decode engine of TP 1 with MLA goes round the prefill ranks"),
    },
    "read_dp": {
        "zero": Policy("reads from prefill DP rank 0"),
        "param": Policy("reads from the prefill DP rank that `remote_dp_rank` names"),
    },
    "read_handshake": {
        "lazy": Policy("handshakes while loading, in a step that reads for one request alone; goes on without after the timeout"),
        "eager_vote": Policy("handshakes with every prefill rank first; all ranks vote, without a limit"),
        "eager_bounded": Policy("as `eager_vote`, but a port that nobody binds within the transfer timeout fails the request"),
    },
    "read_guard": {
        "none": Policy("no check of the KV heads", guard_none),
        "replicated_heads": Policy("unequal TP only with replicated heads or MLA", guard_replicated),
        "layouts": Policy("as `replicated_heads`, and heads a rank must be equal", guard_layouts),
    },
    "read_pairing": {
        "exact": Policy("equal lists only", read_pair_exact),
        "remote_tail_as_local": Policy("a shorter local list becomes the tail of the remote one", read_pair_remote_tail_as_local),
        "head": Policy("a shorter local list takes the head of the remote one", read_pair_head),
        "suffix": Policy("a shorter local list takes the tail of the remote one", read_pair_suffix),
        "by_position": Policy("block i of the prompt with block i of the prompt", read_pair_by_position),
    },
    "read_barrier": {
        "none": Policy("a layer is used whether it landed or not"),
        "per_layer": Policy("each layer waits for its own read, but not under full CUDA graphs (vllm#48534)"),
        "per_layer_or_step": Policy("as per_layer; under full CUDA graphs the forward waits for all reads (0.31+)"),
        "step": Policy("the forward starts when every read of the step landed, and raises if one takes too long (0.33.0)"),
        "step_or_fail": Policy("as step, but a read that takes too long fails its request"),
    },
    "windows": {
        "as_full": Policy("vLLM's hybrid KV cache manager is off, so sliding-window layers are kept and sent like all others"),
        "table_tail": Policy(
            "READ exchanges the last ceil(window / block size) + 1 blocks of a table; WRITE does not start (0.30+)", last_of_both
        ),
        "prompt_tail": Policy("as table_tail, counted from the prompt's end and not from the table's", last_of_prompt),
    },
    "mixed_layers": {
        "any": Policy("layers may differ in what a block of them holds"),
        "hybrid_off": Policy("an engine whose layers differ so starts only without the hybrid KV cache manager (0.30-0.32)"),
    },
    "states": {
        "no_hybrid": Policy("vLLM's hybrid KV cache manager is off, without which a model with recurrent states does not start"),
        "refused": Policy("a model with recurrent states does not start (0.30)"),
        "read": Policy("READ moves recurrent states at equal TP whose size the leg gives; WRITE does not start (0.31, 0.32)"),
        "read_write": Policy("READ at equal TP; WRITE slices or gathers states, and every rank writes its own (0.33.0)"),
    },
    "failed_blocks": {
        "one_table": Policy("a failed read kills a decode engine whose model has several block tables (0.31+)"),
        "any": Policy("a failed read fails its request"),
    },
    "block_ids": {
        "flat": Policy("prefill answers a list of block ids, and decode counts the list that it gets"),
        "groups": Policy("prefill answers a list of block ids a cache group, and decode takes what it gets for that (0.30+)"),
        "either": Policy("decode takes block ids with or without groups"),
    },
    "recv_abort": {
        "none": Policy("decode waits for a read without limit"),
        "silent": Policy("decode drops a read after the receive limit and tells prefill nothing (0.28+)"),
    },
    "sq_retry": {
        "none": Policy("a full send queue fails the transfer"),
        "read": Policy("a full send queue is tried again in READ; in WRITE it fails the transfer (0.26+)"),
    },
    "write_wait": {
        "all_statuses": Policy("a failed write is noticed when all writes of the transfer are over"),
        "first_failure": Policy("the first failed write ends the transfer, others may still be under way (0.31+)"),
    },
    "last_chunk": {
        "by_blocks": Policy("a chunk is the last when the blocks hold the prompt: too early with lookahead blocks"),
        "by_tokens": Policy("a chunk is the last when its tokens complete the prompt (0.32+)"),
    },
    "plain_chunks": {
        "key_error": Policy("a request without params whose prompt takes several steps kills a WRITE prefill scheduler"),
        "skipped": Policy("such a request is none of the connector's business (0.28+)"),
    },
    "write_clamp": {
        "none": Policy("prefill writes its whole block list"),
        "prompt_blocks": Policy("prefill writes no more blocks than the prompt has (0.32+)"),
    },
    "external_zero": {
        "full_table": Policy("decode that needs nothing from prefill announces its blocks all the same"),
        "empty_list": Policy("it announces an empty list, which kills prefill's notify threads (0.26-0.32)"),
        "release": Policy("it releases prefill's blocks (0.33.0)"),
    },
    "early_release_acks": {
        "one": Policy("the release of a request that needs nothing counts as one consumer"),
        "decode_size": Policy("it counts as decode's TP size, so that prefill waits for acks that nobody sends (0.28-0.32)"),
    },
    "early_ack": {
        "crash": Policy("a finished-sending report for a request that prefill does not hold kills its scheduler"),
        "parked": Policy("such a report is parked, then dropped (0.28+)"),
    },
    "late_report": {
        "crash": Policy("a transfer reported finished whose request does not wait for it kills decode's scheduler"),
        "ignored": Policy("such a report is ignored"),
    },
    "pod_routing": {
        "none": Policy("DP ranks are numbered over all pods, on one host"),
        "worker": Policy("pods by `remote_hosts` and `remote_dp_size_local`; the worker keeps only the last ones (vllm#51681)"),
        "task": Policy("pods by `remote_hosts` and `remote_dp_size_local`, kept with each write task (0.31+)"),
    },
    "read_done": {
        "last_layer": Policy("the read counts as done with its last layer"),
        "all_layers": Policy("the read is done with all its layers"),
    },
    "release_to": {
        "own_rank": Policy("decode rank r releases prefill rank r", release_own_rank),
        "sources": Policy("each decode rank releases the rank that it read", release_sources),
        "holders": Policy("each decode rank releases every prefill rank that holds blocks for it", release_holders),
    },
    "release_port": {
        "tp": Policy("at base + tp, so DP rank 0"),
        "raw": Policy("at base + dp × (peer TP as read) + tp"),
        "effective": Policy("at base + dp × (peer TP, own size if unknown) + tp"),
    },
    "acks": {
        "any": Policy("the first release completes a prefill rank", acks_any),
        "fan_in": Policy("a prefill rank waits for decode TP / prefill TP releases", acks_fan_in),
    },
}  # fmt: skip
