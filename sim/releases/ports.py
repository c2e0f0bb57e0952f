"""Port arithmetic: what a rank binds, what its peers dial, and which decode DP rank speaks for a request."""

from __future__ import annotations

from kvcover.sim.releases.sizes import Params


def dp_plus_tp(dp: int, tp: int, tp_size: int) -> int:
    return dp + tp


def dp_times_tp_plus_tp(dp: int, tp: int, tp_size: int) -> int:
    return dp * tp_size + tp


def fold(dp: int, local: int) -> int:
    """The number of a DP rank inside its pod; `local` ranks a pod, 0 when there is one pod."""
    return dp % local if local else dp


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


def release_at_tp(dp: int, tp: int, peer: int, own: int) -> int:
    return tp


def release_at_raw(dp: int, tp: int, peer: int, own: int) -> int:
    return dp * peer + tp


def release_at_effective(dp: int, tp: int, peer: int, own: int) -> int:
    return dp * (peer or own) + tp
