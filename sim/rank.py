"""What every rank of either engine is: a name, two listeners, and a notify thread that one wrong message kills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.ledger import Copy
from sim.transfer import Transfer

if TYPE_CHECKING:
    from sim.world import World


class Rank:
    """One TP rank. A message meant for the other role is a poison: the notify thread logs it and ends for good."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.deaf = False

    def poison(self, what: str, transfer: Transfer, sender: str) -> None:
        self.deaf = True
        self.world.log("poisoned", self.name, sender, transfer.index, detail=what)

    def on_blocks_ready(self, transfer_id: Any, transfer: Transfer, blocks: list[int], decode_dp: int) -> None:
        self.poison("remote_blocks at a decode rank", transfer, "D")

    def on_release(self, transfer_id: Any, transfer: Transfer, consumer_tp: int, sender: str) -> None:
        self.poison("release at a decode rank", transfer, sender)

    def on_write_done(self, transfer_id: Any, transfer: Transfer, writers: int, sender: str) -> None:
        self.poison("write_done at a prefill rank", transfer, sender)

    def on_write_failed(self, transfer_id: Any, transfer: Transfer, sender: str) -> None:
        self.poison("write_failed at a prefill rank", transfer, sender)

    def land(self, layer: int, copy: Copy, transfer: Transfer, source: str, kind: str) -> None:
        """Bytes landed at a rank that is nobody's decode rank: all of them are astray."""
        self.world.stray += len(copy.where)
        self.world.log(kind, source, self.name, transfer.index, layer, "astray")
