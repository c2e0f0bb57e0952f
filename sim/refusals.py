"""What a correct connector refuses before anything moves: pairs of engines between which it can't bring the KV."""

from __future__ import annotations

from kvcover.sim.cache.geometry import check_slices
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.releases.maps import map_fan
from kvcover.sim.scenario.setup import Setup


def refuses(setup: Setup) -> str:
    """Why a correct connector would refuse this pair of engines; empty if it would not."""
    prefill, decode, mode, geometry = setup.prefill, setup.decode, setup.scenario.mode, setup.geometry
    if max(prefill.side.pp, decode.side.pp) > 1:
        return "pipeline parallelism"
    if geometry.mixed and prefill.tp != decode.tp:
        return "layers of two kinds under unequal tensor parallel sizes"
    if geometry.has_states:
        if why := prefill.state_error(mode) or decode.state_error(mode):
            return str(why)
        if mode == "read" and prefill.tp != decode.tp:
            return "READ of recurrent states under unequal tensor parallel sizes"
    if mode == "write" and any(table.window for table in (*prefill.tables, *decode.tables)):
        return "sliding-window block tables in WRITE"
    if [table.window for table in prefill.tables] != [table.window for table in decode.tables]:
        return "one engine has block tables of its own for sliding windows, the other has not"
    try:
        map_fan(0, prefill.tp, decode.tp, geometry)
        check_slices(prefill.shape, decode.shape)
    except PeerRefusal as refusal:
        return refusal.text
    here, there = prefill.shape.kv_dtype, decode.shape.kv_dtype
    return f"prefill's KV is {here}, decode's {there}" if here != there else ""
