"""Which transfers a decode scheduler knows, who waits for them, and how many ranks have reported them finished."""

from __future__ import annotations

from collections.abc import Callable

from kvcover.sim.moriio.transfer import Transfer


class Reports:
    """The reports of one scheduler's `ranks` ranks; the executor counts them and does not ask from whom.

    `all_reported(transfer, failed)` is called with the last one. `waiting` are the requests that wait for their KV.
    """

    def __init__(self, ranks: int, all_reported: Callable[[Transfer, bool], None]) -> None:
        self.waiting: set[int] = set()
        self._ranks = ranks
        self._all_reported = all_reported
        self._mapped: dict[str, Transfer] = {}  # by transfer id, from admission to the request's end
        self._id_of: dict[int, str] = {}  # by request
        self._counts: dict[int, int] = {}
        self._failed: set[int] = set()

    def map(self, transfer: Transfer, transfer_id: str) -> None:
        """The request has this transfer from now on."""
        self._mapped[transfer_id] = transfer
        self._id_of[transfer.index] = transfer_id

    def unmap(self, transfer: Transfer) -> None:
        """The request ended: its transfer id means nothing here any more, even if another request has it by now."""
        if (transfer_id := self._id_of.pop(transfer.index, None)) is not None:
            self._mapped.pop(transfer_id, None)

    def mapped(self, transfer_id: str) -> Transfer | None:
        """The request that has this transfer now."""
        return self._mapped.get(transfer_id)

    def id_of(self, transfer: Transfer) -> str | None:
        """The transfer that a request has now."""
        return self._id_of.get(transfer.index)

    def report(self, transfer_id: str, failed: bool) -> bool:
        """A rank reported the transfer finished. Returns False if no request here has it."""
        transfer = self._mapped.get(transfer_id)
        if transfer is None:
            return False
        index = transfer.index
        self._counts[index] = self._counts.get(index, 0) + 1
        if failed:
            self._failed.add(index)
        if self._counts[index] >= self._ranks:
            del self._counts[index]
            failed = index in self._failed
            self._failed.discard(index)
            self._all_reported(transfer, failed)
        return True
