"""What every part of a run shares: its setup, the time, what happened, the network, and the faults that are planned."""

from __future__ import annotations

from kvcover.faults import Injector
from kvcover.sim.kernel.clock import MS, Clock
from kvcover.sim.kernel.events import Fields
from kvcover.sim.kernel.history import History
from kvcover.sim.kernel.network import Network
from kvcover.sim.scenario.setup import Setup

Batch = tuple[int, str, str, str, int, int]


class Context:
    """A setup under way. `stray` counts the cells that batches changed outside of their own requests' blocks.

    `posts`, for who asks by making it a dictionary, has when each batch was posted, by its row in the history without details.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.mode: str = setup.scenario.mode
        self.geometry = setup.geometry
        self.fabric = setup.fabric
        self.timing = setup.scenario.timing
        self.clock = Clock(setup.scenario.seed)
        self.history = History()
        self.injector = Injector(setup.faults)
        self.network = Network(self.clock, self.history, self.timing.message_ns, self.injector)
        self.stray = 0
        self.posts: dict[Batch, int] | None = None

    @property
    def now_ms(self) -> float:
        """Virtual time in ms, in which faults are planned."""
        return self.clock.now / MS

    def note_post(self, kind: str, land_ns: int, source: str, target: str, request: int, layer: int) -> None:
        """A batch is posted now that will land then."""
        if self.posts is not None:
            self.posts[land_ns, kind, source, target, request, layer] = self.clock.now

    def log(self, kind: str, actor: str, peer: str = "", request: int = -1, layer: int = -1, fields: Fields | None = None) -> None:
        """Append to the history at the present instant."""
        self.history.rows.append((self.clock.now, kind, actor, peer, request, layer, fields))
