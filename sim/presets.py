"""Models by name, each with its source, and models from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import InputError, nearest
from sim.geometry import Geometry

DTYPE_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


class Preset(msgspec.Struct, frozen=True):
    """A named model and the public place where its numbers stand."""

    name: str
    geometry: Geometry
    source: str


def _gqa(layers: int, kv_heads: int, head_dim: int) -> Geometry:
    return Geometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "deepseek-v3",
            Geometry(layers=61, kv_heads=1, head_dim=512 + 64, mla=True),
            "huggingface.co/deepseek-ai/DeepSeek-V3 config.json: num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64",
        ),
        Preset(
            "deepseek-r1",
            Geometry(layers=61, kv_heads=1, head_dim=512 + 64, mla=True),
            "huggingface.co/deepseek-ai/DeepSeek-R1 config.json: num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64",
        ),
        Preset(
            "qwen3-32b",
            _gqa(64, 8, 128),
            "huggingface.co/Qwen/Qwen3-32B config.json: num_hidden_layers 64, num_key_value_heads 8, head_dim 128",
        ),
        Preset(
            "qwen3-235b-a22b",
            _gqa(94, 4, 128),
            "huggingface.co/Qwen/Qwen3-235B-A22B config.json: num_hidden_layers 94, num_key_value_heads 4, head_dim 128",
        ),
        Preset(
            "llama-3.1-8b",
            _gqa(32, 8, 128),
            "huggingface.co/meta-llama/Llama-3.1-8B config.json: num_hidden_layers 32, num_key_value_heads 8, "
            "hidden_size 4096 / num_attention_heads 32",
        ),
        Preset(
            "llama-3.1-70b",
            _gqa(80, 8, 128),
            "huggingface.co/meta-llama/Llama-3.1-70B config.json: num_hidden_layers 80, num_key_value_heads 8, "
            "hidden_size 8192 / num_attention_heads 64",
        ),
        Preset(
            "llama-3.2-1b",
            _gqa(16, 8, 64),
            "huggingface.co/meta-llama/Llama-3.2-1B config.json: num_hidden_layers 16, num_key_value_heads 8, head_dim 64",
        ),
    )
}


def resolve_model(text: str, dtype: str) -> Geometry:
    """Geometry of `PRESET`, `layers=2,kv_heads=8,head_dim=8`, `layers=2,mla=64+16` or the path of a `config.json`.

    Raises InputError naming the nearest preset or the missing field.
    """
    geometry = _resolve(text)
    return msgspec.structs.replace(geometry, element_bytes=DTYPE_BYTES[dtype])


def _resolve(text: str) -> Geometry:
    if preset := PRESETS.get(text.lower()):
        return preset.geometry
    if "=" in text:
        return _from_numbers(text)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path)
    raise InputError("model", f"no model {text!r}", nearest(text.lower(), PRESETS))


def _positive(place: str, value: Any, limit: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise InputError(place, f"{value!r} is not a whole number", "use a number such as 8") from None
    if isinstance(value, bool) or not 1 <= number <= limit:
        raise InputError(place, f"{value!r} is out of range", f"use 1 to {limit}")
    return number


def _from_numbers(text: str) -> Geometry:
    form = "layers=2,kv_heads=8,head_dim=8 or layers=2,mla=64+16"
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name in fields:
            raise InputError("model", f"can't read {part!r} in {text!r}", f"use {form}")
        if name not in ("layers", "kv_heads", "head_dim", "mla"):
            raise InputError("model", f"no field {name!r} in {text!r}", nearest(name, ("layers", "kv_heads", "head_dim", "mla")))
        fields[name] = value
    if set(fields) == {"layers", "mla"}:
        parts = fields["mla"].split("+")
        width = sum(_positive("model.mla", part, 1 << 16) for part in parts)
        return Geometry(layers=_positive("model.layers", fields["layers"], 1024), kv_heads=1, head_dim=width, mla=True)
    if set(fields) == {"layers", "kv_heads", "head_dim"}:
        return _gqa(
            _positive("model.layers", fields["layers"], 1024),
            _positive("model.kv_heads", fields["kv_heads"], 1024),
            _positive("model.head_dim", fields["head_dim"], 1 << 16),
        )
    raise InputError("model", f"{text!r} has not the fields of a model", f"use {form}")


def _from_config(path: Path) -> Geometry:
    """Read the fields that vLLM itself reads from a Hugging Face `config.json` (a nested `text_config` counts)."""
    place = f"model {path}"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError(place, f"can't be read: {error.strerror or error}", "give the path of a config.json") from None
    except ValueError:
        raise InputError(place, "is not JSON", "give a Hugging Face config.json") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "num_hidden_layers" not in config:
        raise InputError(place, "has no num_hidden_layers", "give a Hugging Face config.json")

    def number(key: str, default: Any = None) -> int:
        value = config.get(key)
        return _positive(f"{place} {key}", default if value is None else value, 1 << 20)

    layers = number("num_hidden_layers")
    if config.get("kv_lora_rank") is not None:
        return Geometry(layers=layers, kv_heads=1, head_dim=number("kv_lora_rank") + number("qk_rope_head_dim"), mla=True)
    attention_heads = number("num_attention_heads")
    head_dim = config.get("head_dim") or number("hidden_size") // attention_heads
    return _gqa(layers, number("num_key_value_heads", attention_heads), _positive(f"{place} head_dim", head_dim, 1 << 16))
