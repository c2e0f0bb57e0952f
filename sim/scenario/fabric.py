"""How long a batch of bytes takes: a fixed cost and a bandwidth, one NIC a rank, batches of a rank one after another."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcover.sim.errors import InputError, nearest, short

FixedNs = Annotated[int, Meta(ge=0, le=10**12, extra_json_schema={"unit": "ns"})]
GbPerS = Annotated[float, Meta(ge=1e-6, le=1e6, extra_json_schema={"unit": "GB/s, of 1e9 bytes"})]


class FabricSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fabric in own numbers, such as xGMI, for which nobody has published any: fixed cost and bandwidth of a batch."""

    write_fixed_ns: FixedNs
    write_gb_per_s: GbPerS
    read_fixed_ns: FixedNs
    read_gb_per_s: GbPerS


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A batch takes `fixed` ns and its bytes at `gb_per_s` (GB = 1e9 bytes), and at least `floor` ns. 0 GB/s is no wire.

    The numbers are fits to MoRI's published benchmark tables; `fit_error` is the largest relative error against them.
    """

    name: str
    write_fixed_ns: int
    write_gb_per_s: float
    read_fixed_ns: int
    read_gb_per_s: float
    write_floor_ns: int = 0
    fit_error: float
    source: str

    def occupancy_ns(self, size_bytes: int, mode: str) -> int:
        """How long the rank's NIC is busy with the bytes."""
        rate = self.write_gb_per_s if mode == "write" else self.read_gb_per_s
        return round(size_bytes / rate) if rate else 0

    def tail_ns(self, busy_ns: int, mode: str) -> int:
        """How long after its last byte left a batch has landed."""
        if mode == "read":
            return self.read_fixed_ns
        return max(self.write_fixed_ns, self.write_floor_ns - busy_ns)


_TABLE = "ROCm/mori docs/MORI-IO-BENCHMARK.md"
FABRICS: dict[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        Fabric(
            name="cx7", write_fixed_ns=5850, write_gb_per_s=48.8, read_fixed_ns=6550, read_gb_per_s=43.9,
            fit_error=0.025, source=f"{_TABLE}: CX7, one transfer at a time",
        ),
        Fabric(
            name="thor2", write_fixed_ns=30_000, write_gb_per_s=48.9, read_fixed_ns=115_500, read_gb_per_s=50.0,
            write_floor_ns=36_500, fit_error=0.042, source=f"{_TABLE}: Thor2, batches of 128 writes and of 256 reads",
        ),
        Fabric(
            name="loopback", write_fixed_ns=0, write_gb_per_s=0.0, read_fixed_ns=0, read_gb_per_s=0.0,
            fit_error=0.0, source="bytes are there when the batch is posted, as in kvcover's loopback mori.io",
        ),
    )
}  # fmt: skip


def get_fabric(given: str | FabricSpec) -> Fabric:
    """The preset of that name, or a fabric in own numbers; raises InputError with the nearest preset."""
    if isinstance(given, FabricSpec):
        return Fabric(name="own numbers", fit_error=0.0, source="the scenario", **msgspec.to_builtins(given))
    if given not in FABRICS:
        raise InputError("fabric", f"no fabric {short(given)}", nearest(given, FABRICS))
    return FABRICS[given]
