"""What routers put into `kv_transfer_params`: recorded from the real programs, read in public sources, or a user's own file.

A value that starts with `$` is filled in at run time: one of `NAMES`, and, on the decode leg in READ, `$response.KEY`, which
copies KEY from the prefill engine's answer when it is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.releases.records import get_release
from kvcover.sim.scenario.legs_file import MODES, OwnLegs, is_file, parse_legs, read_text

Template = dict[str, Any]
NAMES = (
    "transfer_id",
    *(f"{side}.{size}" for side in ("prefill", "decode") for size in ("tp", "dp", "dp_rank", "dp_local", "hosts")),
)
"""What `$` names stand for: the id of the request, and what both sides registered."""


class Slot(NamedTuple):
    """Where a leg goes: an instance, and its DP rank."""

    instance: int
    dp: int


Choice = Literal["all_pairs", "one_counter", "flat"]


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """One router release: the legs it sends in each mode; None where a user's file doesn't say.

    `forwards_response`: in READ the decode leg starts from everything that prefill answered.
    `pins`: which legs get the other side's DP rank as `remote_dp_rank` when that side has several.
    `decode_follows`: the decode leg goes to decode's DP rank of prefill's number when prefill has several; where decode
    has fewer, its front end rejects the request.
    `choice`: which instances a request goes to if there are several, see `choose`.
    `registration_expiry_s`: how long after its last heartbeat an instance is forgotten (None: never).
    """

    name: str
    write_prefill: Template | None = None
    write_decode: Template | None = None
    read_prefill: Template | None = None
    read_decode: Template | None = None
    forwards_response: bool = False
    pins: tuple[str, ...] = ()
    source: str
    decode_follows: bool = False
    choice: Choice = "all_pairs"
    registration_expiry_s: float | None = None

    @property
    def read_elsewhere(self) -> bool:
        """Whether its legs are what public sources say, and were never recorded."""
        return self.source.startswith("from public sources")

    @property
    def recorded(self) -> bool:
        """Whether its legs are those of a real program."""
        return self.source.endswith("recorded on loopback") or "recorded on loopback:" in self.source

    def choose(self, index: int, prefill: tuple[int, int], decode: tuple[int, int]) -> tuple[Slot, Slot]:
        """Where request `index` goes; instances and DP ranks of each side.

        `all_pairs` lets every slot of prefill meet every one of decode. `flat` counts the slots of each side, instances first.
        `one_counter` takes prefill's instance and its DP rank from one number, so that some slots are never hit. In both of
        these the two sides have the same number, and some pairs never meet. One instance a side is as ever: ranks in turn.
        """
        (p_instances, p_dp), (d_instances, d_dp) = prefill, decode
        if p_instances == d_instances == 1:
            return Slot(0, index % p_dp), Slot(0, index % d_dp)
        if self.choice == "one_counter":
            number = index + 1  # it counts a request before it looks
            return Slot(number % p_instances, number % p_dp), Slot(number % d_instances, number // d_instances % d_dp)
        p_slots, d_slots = p_instances * p_dp, d_instances * d_dp
        p = index % p_slots
        d = (index if self.choice == "flat" else p + index // p_slots) % d_slots
        return Slot(p % p_instances, p // p_instances), Slot(d % d_instances, d // d_instances)

    def legs(self, mode: str) -> tuple[Template, Template]:
        """Both templates; raises InputError where a user's file has none for the mode."""
        found: dict[str, Template | None] = {side: getattr(self, f"{mode}_{side}") for side in ("prefill", "decode")}
        if missing := [side for side, template in found.items() if template is None]:
            has = [f"{m}.{side}" for m in MODES for side in ("prefill", "decode") if getattr(self, f"{m}_{side}") is not None]
            raise InputError("router", f"{self.name} has no {missing[0]} leg for {mode.upper()}", f"it has {', '.join(has)}")
        return found["prefill"] or {}, found["decode"] or {}

    def prefill_leg(self, mode: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The prefill leg's params; `values` maps `$` names (without the `$`) to what they stand for."""
        params = _fill(self.legs(mode)[0], values, {})
        if f"{mode}_prefill" in self.pins and values["decode.dp"] > 1:
            params["remote_dp_rank"] = values["decode.dp_rank"]
        return params

    def decode_leg(self, mode: str, values: Mapping[str, Any], response: Mapping[str, Any] | None) -> dict[str, Any]:
        """The decode leg's params; in READ `response` is what the prefill engine answered."""
        answered = response or {}
        params = dict(answered) if self.forwards_response and mode == "read" else {}
        params.update(_fill(self.legs(mode)[1], values, answered))
        if f"{mode}_decode" in self.pins and values["prefill.dp"] > 1:
            params["remote_dp_rank"] = values["prefill.dp_rank"]
        return params


def _fill(template: Template, values: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in template.items():
        if not isinstance(value, str) or not value.startswith("$"):
            filled[key] = value
        elif value.startswith("$$"):
            filled[key] = value[1:]
        elif value.startswith("$response."):
            if (name := value.removeprefix("$response.")) in response:
                filled[key] = response[name]
        else:
            filled[key] = values[value[1:]]
    return filled


_TO_PREFILL: Template = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
}
_TO_DECODE: Template = {"do_remote_decode": False, "do_remote_prefill": True}
_NO_BLOCKS: Template = {"remote_engine_id": None, "remote_block_ids": None}
_ANSWERED: Template = {
    "remote_engine_id": "$response.remote_engine_id",
    "remote_block_ids": "$response.remote_block_ids",
    "transfer_id": "$response.transfer_id",
}
_D_SIZES: Template = {"remote_dp_size": "$decode.dp", "remote_tp_size": "$decode.tp"}
_P_SIZES: Template = {"remote_dp_size": "$prefill.dp", "remote_tp_size": "$prefill.tp"}
_ID: Template = {"transfer_id": "$transfer_id"}

_TOY_025 = Router(
    name="toy-proxy 0.25.1",
    write_prefill=_TO_PREFILL | _ID | _D_SIZES,
    write_decode=_TO_DECODE | _NO_BLOCKS | _ID | _P_SIZES,
    read_prefill=_TO_PREFILL | _ID | _D_SIZES,
    read_decode=_TO_DECODE | _ANSWERED | _P_SIZES,
    forwards_response=False,
    pins=("write_decode", "read_decode"),
    choice="one_counter",
    source="moriio_toy_proxy_server.py of vLLM 0.24.0 and 0.25.1, recorded on loopback",
)
_TOY_027 = msgspec.structs.replace(
    _TOY_025,
    name="toy-proxy 0.27.0",
    choice="flat",
    source="moriio_toy_proxy_server.py of vLLM 0.26.0 and 0.27.0, recorded on loopback",
)
_TOY_030 = msgspec.structs.replace(
    _TOY_027,
    name="toy-proxy 0.30.0",
    decode_follows=True,
    source="moriio_toy_proxy_server.py of vLLM 0.28.0 to 0.30.0, recorded on loopback",
)
_TOY_033 = msgspec.structs.replace(
    _TOY_030,
    name="toy-proxy 0.33.0",
    read_decode=_TOY_025.legs("read")[1] | {"tp_size": "$response.tp_size"},
    source="moriio_toy_proxy_server.py of vLLM 0.31.0 to 0.33.0, recorded on loopback",
)
_VLLM_016 = Router(
    name="vllm-router 0.1.16",
    write_prefill=_TO_PREFILL | _ID | {"remote_dp_size": 1, "remote_tp_size": "$decode.tp"},
    write_decode=_TO_DECODE | _NO_BLOCKS | _ID | {"remote_dp_size": 1, "remote_tp_size": "$prefill.tp"},
    read_prefill=_TO_PREFILL | _ID | {"remote_dp_size": 1},
    read_decode={"remote_dp_size": 1},
    forwards_response=True,
    pins=(),
    registration_expiry_s=5.0,
    source="vllm-router 0.1.16 from PyPI, recorded on loopback: it ignores the registered DP size",
)
_VLLM_015 = msgspec.structs.replace(
    _VLLM_016,
    name="vllm-router 0.1.15",
    write_prefill=_VLLM_016.legs("write")[0] | {"remote_tp_size": 1},
    write_decode=_VLLM_016.legs("write")[1] | {"remote_tp_size": 1},
    source="vllm-router 0.1.15 from PyPI, recorded on loopback: it sends remote_tp_size 1 whatever registered",
)
_VLLM_017 = msgspec.structs.replace(
    _VLLM_016,
    name="vllm-router 0.1.17",
    write_prefill=_TO_PREFILL | _ID | _D_SIZES,
    write_decode=_TO_DECODE | _NO_BLOCKS | _ID | _P_SIZES,
    read_prefill=_TO_PREFILL | _ID | {"remote_dp_size": "$decode.dp"},
    read_decode={"remote_dp_size": "$prefill.dp"},
    pins=("write_prefill", "write_decode"),
    source="vllm-router 0.1.17 from PyPI, recorded on loopback",
)

_WIDE_EP = msgspec.structs.replace(
    _TOY_033,
    name="wide-ep",
    decode_follows=False,
    write_prefill=_TOY_033.legs("write")[0] | {"remote_dp_size_local": "$decode.dp_local", "remote_hosts": "$decode.hosts"},
    write_decode=_TOY_033.legs("write")[1]
    | {
        "remote_dp_rank": "$prefill.dp_rank",
        "remote_dp_rank_override": True,
        "remote_dp_size_local": "$prefill.dp_local",
        "remote_hosts": "$prefill.hosts",
    },
    source="not recorded: the toy proxy's legs and the pod keys that the connector of 0.28+ reads (llm-d-router#1564)",
)

_RAY_FIRST = Router(
    name="ray-serve #63951",
    write_prefill=_TO_PREFILL | _ID | {"remote_dp_size": 1, "remote_tp_size": 1},
    write_decode=_TO_DECODE | _NO_BLOCKS | _ID | {"remote_dp_size": 1, "remote_tp_size": 1},
    read_prefill=_TO_PREFILL | _ID | {"remote_dp_size": 1, "remote_tp_size": 1},
    read_decode=_TO_DECODE,
    forwards_response=True,
    source="from public sources: Ray Serve's MoRIIO backend as ray#63951 added it; it sends sizes of 1 whatever there is",
)
_RAY_P_SIZES: Template = {"remote_dp_rank": "$prefill.dp_rank", "remote_dp_size": "$prefill.dp", "tp_size": "$prefill.tp"}
_RAY_D_SIZES: Template = {"remote_dp_rank": "$decode.dp_rank", "remote_dp_size": "$decode.dp", "tp_size": "$decode.tp"}
_RAY = msgspec.structs.replace(
    _RAY_FIRST,
    name="ray-serve later",
    write_prefill=_TO_PREFILL | _ID | _RAY_D_SIZES,
    write_decode=_TO_DECODE | _NO_BLOCKS | _ID | _RAY_P_SIZES,
    read_prefill=_TO_PREFILL | _ID | _RAY_D_SIZES,
    read_decode=_TO_DECODE | _RAY_P_SIZES,
    source="from public sources: Ray Serve's MoRIIO backend since it knows sizes; the TP size under the name tp_size",
)
_LLM_D_OWN: Template = {
    "remote_dp_rank": "$prefill.dp_rank",
    "remote_dp_rank_override": True,
    "tp_size": "$decode.tp",
    "remote_dp_size": "$decode.dp",
    "remote_port": None,
}
_LLM_D = Router(
    name="llm-d-router",
    write_prefill=_TO_PREFILL | _ID | _LLM_D_OWN,
    write_decode=_TO_DECODE | {"remote_engine_id": None, "remote_block_ids": []} | _ID | _LLM_D_OWN | {"is_request_leader": True},
    read_prefill=_TO_PREFILL | {"remote_host": None, "remote_port": None},
    read_decode={},
    forwards_response=True,
    decode_follows=True,
    source="from public sources: llm-d-router's sidecar, single pod, WRITE with parallel dispatch; one TP and one DP size for both "
    "sides, here decode's; its addresses are taken for the true ones, which request ids name here",
)

ROUTERS: dict[str, Router] = {
    r.name: r for r in (_TOY_025, _TOY_027, _TOY_030, _TOY_033, _VLLM_015, _VLLM_016, _VLLM_017, _WIDE_EP, _RAY_FIRST, _RAY, _LLM_D)
}
TOY_PROXY = "toy-proxy"


def get_router(name: str, prefill_release: str) -> Router:
    """The router of that name, or the user's own in a file; `toy-proxy` alone is the one of prefill's vLLM release."""
    if is_file(name):
        text = read_text(name)
        return own_router(parse_legs(text, name), f"{name} {hashlib.sha256(text.encode()).hexdigest()[:8]}", name)
    if name == TOY_PROXY:
        name = get_release(prefill_release).toy_proxy
    router = ROUTERS.get(name)
    if router is None:
        hint = f"{nearest(name, [TOY_PROXY, *ROUTERS])}, or a file such as legs.json"
        raise InputError("router", f"no router {short(name)}", hint)
    return router


def own_router(own: OwnLegs, name: str, place: str) -> Router:
    """A user's legs as a router; raises InputError for a `$` name that stands for nothing."""
    for (mode, side), leg in own.legs.items():
        for key, value in leg.items():
            check_name(value, mode, side, f"{place}: {mode}.{side}.{key}")
    legs: dict[str, Any] = {f"{mode}_{side}": leg for (mode, side), leg in own.legs.items()}
    return Router(name=name, **legs, **{"source": "a user's own file", **own.options})


def check_name(value: Any, mode: str, side: str, place: str) -> None:
    """Raise InputError for a value that starts with `$` and is no template on this leg."""
    if not isinstance(value, str) or not value.startswith("$") or value.startswith("$$"):
        return
    if value.startswith("$response."):
        if (mode, side) != ("read", "decode") or value == "$response.":
            problem = f"{value!r}: prefill's answer goes to the decode leg of READ"
            raise InputError(place, problem, "write $$ for a text that begins with $")
    elif value[1:] not in NAMES:
        raise InputError(place, f"{value!r} stands for nothing", nearest(value, [f"${name}" for name in NAMES]))
