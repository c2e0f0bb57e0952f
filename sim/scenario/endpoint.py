"""One engine with every default filled in: its ranks, ports, caches, block tables and release."""

from __future__ import annotations

import math

import msgspec

from kvcover.sim.cache.geometry import AXES, CacheShape, Geometry
from kvcover.sim.cache.layers import Group, Table, groups_of, places_of
from kvcover.sim.cache.presets import DTYPE_BYTES
from kvcover.sim.errors import InputError, PeerRefusal
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.scenario.scenario import Scenario, Side

_MAX_CELLS = 1 << 24  # of one rank and layer
_MOST_DP = 256
_MAX_POOL = 1 << 23  # blocks of all DP ranks: a third of a GB


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One side with every default filled in: an engine, or several alike, each of which registers `tp` and `dp`.

    DP ranks are numbered through all instances, and so are `hosts`: those of the first instance's pods, then the next one's.

    `groups` are its layers by what they are like and which of the block `tables` they use, `places` each layer's group and
    number in there. `shape` is the cache of one rank and layer of the kind that the model as a whole passes for.
    """

    letter: str
    tp: int
    dp: int
    hosts: tuple[str, ...]
    handshake_port: int
    notify_port: int
    shape: CacheShape
    groups: tuple[Group, ...]
    places: tuple[tuple[int, int], ...]
    tables: tuple[Table, ...]
    release: ConnectorRelease
    side: Side

    def rows(self, tokens: int) -> list[tuple[int, int]]:
        """For each block table of a request of so many tokens: blocks that are not allocated, and blocks in all.

        Prefill has computed all of a prompt and keeps it (vLLM frees what a chunked prompt has left behind its window).
        """
        count = -(-(tokens + self.side.lookahead_tokens) // self.shape.block_size)
        return rows_of(self.tables, tokens, count, self.shape.block_size, self.letter == "D")

    def advertised(self, group: Group) -> CacheShape | None:
        """The cache of a layer as peers are told of it: K/V caches of releases that advertise them."""
        return group.shape if self.release.advertised == "layouts" and group.shape.planes > 1 else None

    @property
    def stages(self) -> int:
        """Pipeline stages that start on this host, each of which binds the ports of its rank."""
        return 1 if self.release.stage_ports == "apart" else self.side.pp

    def start_error(self, mode: str) -> PeerRefusal | None:
        """What the release's connector raises when it is started with these caches; None if it starts."""
        judged = self.release.unfit_start == "raises"
        if judged and any(table.state for table in self.tables) and (why := self.state_error(mode)):
            return why
        takes = self.release.call("cache_layouts")
        for group in self.groups:
            if not takes(group.shape.layout, group.shape.planes == 1):
                return PeerRefusal("ValueError", f"unsupported cache shape: {group.shape.layout}", "cache_layouts")
        if not judged:
            return None
        if mode == "write" and any(table.window for table in self.tables):
            text = "WRITE with block tables for sliding windows (hybrid_kv = false turns them off)"
            return PeerRefusal("NotImplementedError", text, "hybrid_manager")
        mixed = len({group.table for group in self.groups}) < len(self.groups)
        if mixed and self.release.mixed_layers == "hybrid_off" and self.side.hybrid_kv:
            text = "layers of unequal block length with the hybrid KV cache manager (hybrid_kv = false turns it off)"
            return PeerRefusal("ValueError", text, "mixed_layers")
        return None

    def state_error(self, mode: str) -> PeerRefusal | None:
        """What is raised when a model with recurrent states is started; None if it starts."""
        policy, off = self.release.states, self.release.hybrid_manager == "off"
        if off or not self.side.hybrid_kv:
            decides = "hybrid_manager" if off else "states"
            return PeerRefusal("ValueError", "recurrent states without the hybrid KV cache manager", decides)
        if policy == "refused":
            return PeerRefusal("NotImplementedError", "recurrent states in a cache group", "states")
        if policy == "read" and mode == "write":
            return PeerRefusal("MoRIIOError", "WRITE of recurrent states", "states")
        attending = sum(not table.state for table in self.tables)
        if mode == "read" and attending > 1:
            text = f"READ of recurrent states beside {attending} block tables of attention"
            return PeerRefusal("MoRIIOError", text, "states")
        return None

    @property
    def all_dp(self) -> int:
        """DP ranks of all instances."""
        return self.dp * self.side.instances

    @property
    def local_dp(self) -> int:
        """DP ranks a pod."""
        return self.all_dp // len(self.hosts)

    def instance(self, dp: int) -> int:
        """The instance that has a DP rank of all."""
        return dp // self.dp

    def own_dp(self, dp: int) -> int:
        """Its number within its instance, which is all that vLLM knows."""
        return dp % self.dp

    def host_of(self, dp: int) -> str:
        """The address of the instance that has a DP rank: its first pod's host."""
        return self.hosts_of(dp)[0]

    def hosts_of(self, dp: int) -> tuple[str, ...]:
        """The hosts of the instance that has a DP rank, one a pod."""
        first = self.instance(dp) * self.side.pods
        return self.hosts[first : first + self.side.pods]

    def instance_at(self, host: str) -> int:
        """The instance at an address; the first one for an address that nobody has."""
        return self.hosts.index(host) // self.side.pods if host in self.hosts else 0

    def pod(self, dp: int) -> int:
        """The pod of a DP rank, counted through all instances, as `hosts` are."""
        return dp // self.local_dp

    def own_pod(self, dp: int) -> int:
        """The same within its instance."""
        return self.pod(dp) % self.side.pods

    def engine_name(self, dp: int) -> str:
        """One DP rank of it: `D1`, or `D` if it has only one."""
        return self.letter + (str(dp) if self.all_dp > 1 else "")

    def needed(self, request: Request) -> int:
        """Cells of a request that one rank needs."""
        blocks = [request.blocks - skipped for skipped, _ in self.rows(request.prompt_tokens)]
        return sum(g.geometry.layers * g.shape.planes * g.shape.heads * blocks[g.table] for g in self.groups)

    def rank_name(self, dp: int, tp: int) -> str:
        return f"{self.letter}{dp}.{tp}" if self.all_dp > 1 else f"{self.letter}{tp}"

    def rank_names(self) -> list[str]:
        return [self.rank_name(dp, tp) for dp in range(self.all_dp) for tp in range(self.tp)]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request with every default filled in; blocks are None when the pool chooses.

    `prefill_dp` and `decode_dp` are numbered through all instances. `rejected`: its router names a DP rank that decode doesn't
    have, and decode's front end says no.
    Its prompt is `blocks` blocks at decode and `prefill_size` at prefill.
    """

    index: int
    arrival_ns: int
    prompt_tokens: int
    blocks: int
    prefill_size: int
    plain: bool
    decode_hit_blocks: int
    suffix_only: bool
    external_zero: bool
    generate_ns: int
    prefill_dp: int
    decode_dp: int
    rejected: bool
    prefill_blocks: tuple[int, ...] | None
    decode_blocks: tuple[int, ...] | None


def has_hybrid_kv(side: Side, release: ConnectorRelease, geometry: Geometry) -> bool:
    """Whether the engine has vLLM's hybrid KV cache manager, and so layers of unequal window unequal block tables.

    With recurrent states it has, or it never starts.
    """
    return geometry.has_states or (side.hybrid_kv and release.hybrid_manager == "on")


def table_rows(name: str, tables: tuple[Table, ...], tokens: int, scenario: Scenario) -> list[tuple[int, int]]:
    """`Endpoint.rows` of an engine that is yet to be filled in."""
    """The engine `name` (prefill or decode) with every default filled in; raises InputError for what does not fit together."""
    side: Side = getattr(scenario, name)
    count = blocks_of(tokens + side.lookahead_tokens, scenario, name)
    return rows_of(tables, tokens, count, block_size_of(scenario, name), name == "decode")


def rows_of(tables: tuple[Table, ...], tokens: int, count: int, block_size: int, skips: bool) -> list[tuple[int, int]]:
    """For each block table: blocks that are not allocated, and blocks in all."""
    return [(0, 1) if table.state else (table.skipped(tokens, block_size) if skips else 0, count) for table in tables]


def block_size_of(scenario: Scenario, name: str) -> int:
    """Tokens a block at one side."""
    size: int = getattr(scenario, name).block_size or scenario.block_size
    return size


def blocks_of(tokens: int, scenario: Scenario, name: str) -> int:
    """Blocks that so many tokens take up on one side."""
    return -(-tokens // block_size_of(scenario, name))


def check_whole_blocks(place: str, tokens: int, scenario: Scenario) -> None:
    """With unequal blocks, what a block beyond the prompt holds would be a matter of taste."""
    sizes = [block_size_of(scenario, name) for name in ("prefill", "decode")]
    step = math.lcm(*sizes)
    if sizes[0] != sizes[1] and tokens % step:
        problem = f"{tokens} tokens are no whole blocks of both {sizes[0]} (prefill) and {sizes[1]} tokens (decode)"
        raise InputError(place, problem, f"use {-(-tokens // step) * step}")


_DEFAULT_ADDRESS = {"prefill": ("10.0.0.1", 6301, 61005), "decode": ("10.0.0.2", 7301, 62005)}


def endpoint_of(
    name: str,
    scenario: Scenario,
    geometry: Geometry,
    requests: tuple[Request, ...],
    release: ConnectorRelease,
    tables: tuple[Table, ...],
) -> Endpoint:
    """The engine `name` (prefill or decode) with every default filled in; raises InputError for what does not fit together."""
    side: Side = getattr(scenario, name)
    host, handshake_port, notify_port = _DEFAULT_ADDRESS[name]
    if side.dp % side.pods:
        raise InputError(f"{name}.pods", f"{side.pods} pods can't share {side.dp} DP ranks", f"use a divisor of {side.dp}")
    names = [side.host or host, *(f"{side.host or host}-instance{number}" for number in range(1, side.instances))]
    hosts = tuple(f"{each}-pod{pod}" if pod else each for each in names for pod in range(side.pods))
    if side.instances * side.dp > _MOST_DP:
        problem = f"{side.instances} instances of {side.dp} DP ranks are more than {_MOST_DP} in all"
        raise InputError(f"{name}.instances", problem, f"use at most {_MOST_DP // side.dp}, or lower dp")
    handshake_port, notify_port = side.handshake_port or handshake_port, side.notify_port or notify_port
    _check_ports(name, handshake_port, notify_port, side.dp * side.tp)
    try:
        for kind in geometry.kinds:
            kind.heads_of(0, side.tp)
    except PeerRefusal as error:
        sizes = [str(t) for t in range(1, 257) if all(kind.splits(t) for kind in geometry.kinds)]
        close = min(sizes, key=lambda t: abs(int(t) - side.tp))
        raise InputError(f"{name}.tp", f"{side.tp}: {error.text}", f"use {close}") from None
    num_blocks = _pool_size(name, side, scenario, requests, tables)

    def shape_of(kind: Geometry) -> CacheShape:
        if kind.state:
            return _state_shape(kind, side.tp, num_blocks)
        layout, order = _layout(name, side, kind, release)
        kv_dtype = side.kv_dtype or scenario.kv_dtype
        return CacheShape(
            planes=kind.planes,
            num_blocks=num_blocks,
            block_size=block_size_of(scenario, name),
            heads=kind.heads_per_rank(side.tp),
            head_bytes=kind.head_dim * DTYPE_BYTES[kv_dtype],
            layout=layout,
            order=order,
            kv_dtype=kv_dtype,
        )

    if geometry.mixed and (side.layout or side.order):
        field = "layout" if side.layout else "order"
        raise InputError(f"{name}.{field}", f"{side.layout or side.order!r} for a model of two kinds of layers", "leave it out")
    groups = groups_of(geometry, has_hybrid_kv(side, release, geometry), shape_of)
    shape = max((group.shape for group in groups), key=lambda shape: shape.units)
    if shape.units > _MAX_CELLS:
        raise InputError(f"{name}.num_blocks", f"{shape.num_blocks} blocks are more than this machine should hold",
                         f"use at most {_MAX_CELLS * shape.num_blocks // shape.units}, or a shorter prompt")  # fmt: skip
    return Endpoint(
        letter=name[0].upper(),
        tp=side.tp,
        dp=side.dp,
        hosts=hosts,
        handshake_port=handshake_port,
        notify_port=notify_port,
        shape=shape_of(geometry),
        groups=groups,
        places=places_of(groups),
        tables=tables,
        release=release,
        side=side,
    )


def _state_shape(kind: Geometry, tp: int, num_blocks: int) -> CacheShape:
    """A page holds the convolution's part of all heads, then the rest; the state has the model's dtype, not the KV cache's."""
    heads, head_bytes = kind.heads_per_rank(tp), kind.head_dim * DTYPE_BYTES["bf16"]
    return CacheShape(
        planes=kind.planes, num_blocks=num_blocks, block_size=1, heads=heads, head_bytes=head_bytes, layout="interleaved"
    )


def _layout(name: str, side: Side, geometry: Geometry, release: ConnectorRelease) -> tuple[str, str]:
    """How the cache lies in memory; a latent is as the release takes it unless said."""
    usual = release.latents if geometry.mla else "split"
    layout = side.layout or usual
    fits = ("latent", "standard") if geometry.mla else ("split", "interleaved", "packed", "standard")
    if layout not in fits:
        kind = "an MLA latent has no K and V" if geometry.mla else "the model has K and V"
        raise InputError(f"{name}.layout", f"{layout!r}: {kind}", f"use {' or '.join(fits)}")
    orders = [order for known, order in AXES if known == layout]
    if side.order is not None and (geometry.mla or side.order not in orders):
        why = "a latent has no heads" if geometry.mla else f"{layout!r} is {orders[0]} only"
        raise InputError(f"{name}.order", f"{side.order!r}: {why}", "leave it out")
    return layout, side.order or orders[0]


def _check_ports(name: str, handshake_port: int, notify_port: int, ranks: int) -> None:
    """Each rank has a port of both kinds: two ranges that must fit and not overlap."""
    if 2 * ranks > 65535:
        raise InputError(name, f"{ranks} ranks need two ports each, and there are 65535", "lower tp or dp")
    for field, port in (("handshake_port", handshake_port), ("notify_port", notify_port)):
        if port + ranks > 65536:
            raise InputError(f"{name}.{field}", f"{port} leaves no room for {ranks} ranks", f"use at most {65536 - ranks}")
    if abs(handshake_port - notify_port) < ranks:
        problem = f"{notify_port} overlaps the handshake ports, {ranks} from {handshake_port} on"
        raise InputError(f"{name}.notify_port", problem, f"keep them at least {ranks} apart")


def _pool_size(name: str, side: Side, scenario: Scenario, requests: tuple[Request, ...], tables: tuple[Table, ...]) -> int:
    """Blocks of a rank's pool: as asked, else twice what its requests need, and block 0, which vLLM never hands out.

    With a workload blocks are used again; without, all requests may be there at once and must fit.
    """
    all_dp = side.dp * side.instances
    need, highest, largest = [0] * all_dp, 0, 0
    for request in requests:
        rows = table_rows(name, tables, request.prompt_tokens, scenario)
        size = sum(count - skipped for skipped, count in rows)
        need[getattr(request, f"{name}_dp")] += size
        largest = max(largest, size)
        highest = max(highest, *(getattr(request, f"{name}_blocks") or (0,)))
    size = side.num_blocks or max(2 * max(need) + 1, highest + 1)
    if largest > size - 1:
        raise InputError(f"{name}.num_blocks", f"{size} blocks can't hold a request of {largest}", f"use at least {largest + 1}")
    if highest >= size:
        raise InputError(f"{name}.num_blocks", f"{size} blocks have no block {highest}", f"use at least {highest + 1}")
    if size * all_dp > _MAX_POOL:
        problem = f"{size} blocks on each of {all_dp} DP ranks are more than the {_MAX_POOL} in all that fit in memory"
        raise InputError(f"{name}.num_blocks", problem, f"use at most {_MAX_POOL // all_dp}, lower dp, or use a shorter prompt")
    return size
