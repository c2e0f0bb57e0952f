"""What a prefill rank tells decode ranks of a transfer: that it is written, or never will be."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcover.sim.kernel.events import Sent
from kvcover.sim.moriio.legs import Leg
from kvcover.sim.moriio.rank import Rank
from kvcover.sim.moriio.write_job import Job
from kvcover.sim.releases.ports import fold
from kvcover.sim.releases.sizes import as_int, non_positive_is_own


class Notices:
    """The messages of one prefill rank. `last_leg` is the leg of the job that it began last, which some releases route by."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.context = rank.context
        self.me = rank.me
        self.name = rank.name
        self.last_leg: Leg | None = None
        release = self.me.release
        self._offset, self._done_to = release.call("notify_ports"), release.call("write_done_to")

    def done(self, job: Job) -> None:
        """All layers are written: one message to each rank that the release would tell."""
        writers = {target.tp_rank: target.writers for target in job.targets}
        for tp in self._done_to(self.rank.tp, job.targets):
            self._notify(job, job.decode_dp, tp, "write_done", partial(self._say_done, job, writers.get(tp, 1)))

    def failed(self, job: Job, dp: int) -> None:
        """Nothing was or will be written: one message to each rank of DP rank `dp` that the job would have written to."""
        for target in job.targets:
            self._notify(job, dp, target.tp_rank, "write_failed", partial(self._say_failed, job))

    def _notify(self, job: Job, dp: int, tp: int, what: str, deliver: Any) -> None:
        leg = job.leg
        assert leg is not None
        route = self.last_leg if self.me.release.pod_routing == "worker" and self.last_leg is not None else leg
        offset = self._offset(fold(dp, route.pod_dp), tp, non_positive_is_own(as_int(leg.peer_tp), self.me.tp))
        port = leg.notify_port + offset
        self.context.log(f"{what}_sent", self.name, request=job.transfer.index, fields=Sent(port))
        self.context.network.send(self.name, (route.pod_host(dp), port), job.transfer.index, what, deliver)

    def _say_done(self, job: Job, writers: int, rank: Rank) -> None:
        assert job.leg is not None
        rank.on_write_done(job.leg.transfer_id, job.transfer, writers, self.name)

    def _say_failed(self, job: Job, rank: Rank) -> None:
        assert job.leg is not None
        rank.on_write_failed(job.leg.transfer_id, job.transfer, self.name)
