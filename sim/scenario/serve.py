"""`vllm serve` command lines of prefill and decode as a scenario, as far as the connector cares about them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from kvcover.faults.read import UnfitJson, plain_int, plain_json
from kvcover.sim.cache.presets import PRESETS
from kvcover.sim.errors import InputError, nearest, short

_DTYPES = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
           "float32": "fp32"}  # fmt: skip
_READ_MODE = "VLLM_MORIIO_CONNECTOR_READ_MODE"
Fields = dict[str, Any]


def scenario_of_serve(prefill: str, decode: str, model: str | None = None) -> tuple[Fields, list[str]]:
    """Fields of a scenario (`build` takes them), and what was read of the command lines besides, in words.

    `model` stands in for the one that the command lines name. Raises InputError naming the option, the flag and the value.
    """
    sides = {"prefill": _Side("--prefill", prefill), "decode": _Side("--decode", decode)}
    modes = {side.mode for side in sides.values() if side.mode}
    if len(modes) > 1:
        told = f"prefill is in {sides['prefill'].mode.upper()}, decode in {sides['decode'].mode.upper()}"
        raise InputError("read_mode", told, "set the same on both sides; nothing else can be said before")
    named = model or sides["decode"].model or sides["prefill"].model
    fields: Fields = {name: side.fields for name, side in sides.items()}
    notes: list[str] = []
    fields["mode"] = modes.pop() if modes else "write"
    if not any(side.mode for side in sides.values()):
        notes.append("read_mode is on neither side: WRITE, as vLLM takes it")
    if named:
        fields["model"] = _preset(named)
    else:
        raise InputError("--model", "neither command line names a model", "give it, as for `kvcover run`")
    return fields, notes


def _preset(name: str) -> str:
    """The preset that a model's name means; what is none is left for `build` to say so."""
    base = name.rstrip("/").rpartition("/")[2].lower()
    if name in PRESETS or "=" in name or name.endswith(".json"):
        return name
    found = [preset for preset in PRESETS if base.startswith(preset)]
    if not found:
        known = nearest(base, PRESETS)
        raise InputError("--model", f"no preset for {short(name)}", f"{known} or give layers=2,mla=64+16 or a config.json")
    return max(found, key=len)


class _Side:
    """One command line: fields of a scenario's `Side`, and the mode and model if it says them."""

    def __init__(self, option: str, text: str) -> None:
        self.option, self.mode, self.model, self.dp_local = option, "", "", 0
        self.fields: Fields = {}
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise InputError(option, f"can't be read as a command line: {error}", "quote it as in a shell") from None
        for name, value in self._flags(words):
            if (read := _FLAGS.get(name)) is not None:
                read(self, name, value)
        if self.dp_local and self.fields.get("dp", 1) > self.dp_local:
            self.fields["pods"] = -(-self.fields["dp"] // self.dp_local)

    def _flags(self, words: list[str]) -> Iterator[tuple[str, str]]:
        """Flags with their values; variables before the command, and the model as the first word after `serve`."""
        while words and (match := re.fullmatch(r"(\w+)=(.*)", words[0])):
            words.pop(0)
            yield match[1], match[2]
        while words and words[0] in ("vllm", "serve", "python", "python3", "-m", "vllm.entrypoints.openai.api_server"):
            words.pop(0)
        if words and not words[0].startswith("-"):
            self.model = words.pop(0)
        while words:
            name, equals, value = words.pop(0).partition("=")
            if not equals and words and (not words[0].startswith("-") or re.fullmatch(r"-[0-9]+", words[0])):
                value = words.pop(0)
            yield _SHORT.get(name, name.replace("_", "-")), value

    def number(self, name: str, value: str) -> int:
        """A whole number."""
        try:
            return plain_int(value)
        except ValueError:
            raise InputError(self.option, f"{name} {short(value)} is no number", "write it as vLLM takes it") from None

    def table(self, name: str, value: str) -> Fields:
        """A JSON table."""
        try:
            found = plain_json(value)
        except (UnfitJson, ValueError) as error:
            raise InputError(self.option, f"{name} is not JSON: {error}", "quote it with '…'") from None
        if not isinstance(found, dict):
            raise InputError(self.option, f"{name} {short(found)} is no table", "quote it with '…'")
        return found


_SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size",
          "-dpl": "--data-parallel-size-local"}  # fmt: skip


def _size(field: str) -> Callable[[_Side, str, str], None]:
    def read(side: _Side, name: str, value: str) -> None:
        side.fields[field] = side.number(name, value)

    return read


def _model(side: _Side, name: str, value: str) -> None:
    side.model = value


def _local(side: _Side, name: str, value: str) -> None:
    side.dp_local = side.number(name, value)


def _dtype(side: _Side, name: str, value: str) -> None:
    if value not in _DTYPES:
        raise InputError(side.option, f"{name} {short(value)} is not known", nearest(value, _DTYPES))
    if _DTYPES[value]:
        side.fields["kv_dtype"] = _DTYPES[value]


def _eager(side: _Side, name: str, value: str) -> None:
    side.fields["cuda_graphs"] = "none"


def _one_table(side: _Side, name: str, value: str) -> None:
    side.fields["hybrid_kv"] = False


def _compilation(side: _Side, name: str, value: str) -> None:
    if value.startswith("{") and (mode := str(side.table(name, value).get("cudagraph_mode", ""))):
        side.fields["cuda_graphs"] = "full" if "FULL" in mode.upper() else "piecewise" if "PIECEWISE" in mode.upper() else "none"


def _speculative(side: _Side, name: str, value: str) -> None:
    tokens = side.table(name, value).get("num_speculative_tokens")
    if isinstance(tokens, int):
        side.fields["lookahead_tokens"] = tokens


def _read_mode(side: _Side, name: str, value: str) -> None:
    side.mode = "read" if value.strip().lower() in ("1", "true") else "write"


def _transfer(side: _Side, name: str, value: str) -> None:
    table = side.table(name, value)
    connector = table.get("kv_connector")
    if connector != "MoRIIOConnector":
        problem = f"kv_connector is {short(connector)}"
        raise InputError(side.option, problem, "kvcover knows MoRIIOConnector only")
    role, wanted = table.get("kv_role"), {"--prefill": "kv_producer", "--decode": "kv_consumer"}[side.option]
    if role != wanted:
        raise InputError(side.option, f"kv_role is {short(role)}", f"it is {wanted} on this side: are the two mixed up?")
    extra = table.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise InputError(side.option, f"kv_connector_extra_config {short(extra)} is no table", "quote it with '…'")
    if "read_mode" in extra:
        _read_mode(side, "read_mode", str(extra["read_mode"]))
    for key in ("handshake_port", "notify_port"):
        if key in extra:
            side.fields[key] = side.number(key, str(extra[key]))


_FLAGS: dict[str, Callable[[_Side, str, str], None]] = {
    "--model": _model,
    "--tensor-parallel-size": _size("tp"),
    "--data-parallel-size": _size("dp"),
    "--data-parallel-size-local": _local,
    "--pipeline-parallel-size": _size("pp"),
    "--block-size": _size("block_size"),
    "--max-num-batched-tokens": _size("max_tokens_per_step"),
    "--kv-cache-dtype": _dtype,
    "--enforce-eager": _eager,
    "--disable-hybrid-kv-cache-manager": _one_table,
    "--compilation-config": _compilation,
    "-O": _compilation,
    "--speculative-config": _speculative,
    "--kv-transfer-config": _transfer,
    _READ_MODE: _read_mode,
}
