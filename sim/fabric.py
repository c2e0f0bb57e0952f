"""How long a batch of bytes takes: a fixed cost and a bandwidth, one NIC a rank, batches of a rank one after another."""

from __future__ import annotations

import msgspec

from sim.errors import InputError, nearest


class FabricSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fabric in own numbers, such as xGMI, for which nobody has published any: fixed cost and bandwidth of a batch."""

    write_fixed_ns: int
    write_gb_per_s: float
    read_fixed_ns: int
    read_gb_per_s: float

    def __post_init__(self) -> None:
        if min(self.write_fixed_ns, self.read_fixed_ns) < 0 or min(self.write_gb_per_s, self.read_gb_per_s) <= 0:
            raise ValueError("times must not be negative and bandwidths must be positive")


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed` ns for a batch to land plus its bytes at `gb_per_s` (GB = 1e9 bytes). 0 GB/s is no wire at all.

    The numbers are least-squares fits to MoRI's published benchmark table; `fit_error` is the largest relative error.
    """

    name: str
    write_fixed_ns: int
    write_gb_per_s: float
    read_fixed_ns: int
    read_gb_per_s: float
    fit_error: float
    source: str

    def occupancy_ns(self, size_bytes: int, mode: str) -> int:
        """How long the rank's NIC is busy with the bytes."""
        rate = self.write_gb_per_s if mode == "write" else self.read_gb_per_s
        return round(size_bytes / rate) if rate else 0

    def fixed_ns(self, mode: str) -> int:
        return self.write_fixed_ns if mode == "write" else self.read_fixed_ns


_TABLE = "ROCm/mori docs/MORI-IO-BENCHMARK.md"
FABRICS: dict[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        Fabric(
            name="cx7", write_fixed_ns=5850, write_gb_per_s=48.8, read_fixed_ns=6550, read_gb_per_s=43.9,
            fit_error=0.025, source=f"{_TABLE}: CX7, batch 1",
        ),
        Fabric(
            name="thor2", write_fixed_ns=30_000, write_gb_per_s=48.9, read_fixed_ns=115_500, read_gb_per_s=50.0,
            fit_error=0.18, source=f"{_TABLE}: Thor2, batches of 128 writes and 256 reads",
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
        raise InputError("fabric", f"no fabric {given!r}", nearest(given, FABRICS))
    return FABRICS[given]
