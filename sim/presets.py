"""Models by name, each with its source, and models from a Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from faults.read import UnfitJson, plain_int, plain_json
from sim.errors import InputError, nearest, short
from sim.geometry import Geometry

DTYPE_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_MAX_LAYERS, _MAX_HEADS, _MAX_WIDTH = 1024, 1024, 1 << 16


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


def resolve_model(text: str) -> Geometry:
    """Geometry of `PRESET`, `layers=2,kv_heads=8,head_dim=8`, `layers=2,mla=64+16` or the path of a `config.json`.

    Raises InputError naming the nearest preset or the missing field.
    """
    if preset := PRESETS.get(text.lower()):
        return preset.geometry
    if "=" in text:
        return _from_numbers(text)
    path = Path(text)
    if text and _is_folder(path):
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path)
    raise InputError("model", f"no model {short(text)}", nearest(text[:60], PRESETS))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _number(place: str, text: str, limit: int) -> int:
    """A number written by hand, 1 to `limit`."""
    try:
        return _within(place, text, plain_int(text), limit)
    except ValueError:
        raise InputError(place, f"{short(text)} is not a whole number", "use a number such as 8") from None


def _within(place: str, value: object, number: int, limit: int) -> int:
    if not 1 <= number <= limit:
        raise InputError(place, f"{short(value)} is out of range", f"use 1 to {limit}")
    return number


def _from_numbers(text: str) -> Geometry:
    form = "layers=2,kv_heads=8,head_dim=8 or layers=2,mla=64+16"
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name in fields:
            raise InputError("model", f"can't read {short(part)} in {short(text)}", f"use {form}")
        if name not in ("layers", "kv_heads", "head_dim", "mla"):
            hint = nearest(name, ("layers", "kv_heads", "head_dim", "mla"))
            raise InputError("model", f"no field {short(name)} in {short(text)}", hint)
        fields[name] = value
    if set(fields) == {"layers", "mla"}:
        width = sum(_number("model.mla", part, _MAX_WIDTH) for part in fields["mla"].split("+"))
        _within("model.mla", fields["mla"], width, _MAX_WIDTH)
        return Geometry(layers=_number("model.layers", fields["layers"], _MAX_LAYERS), kv_heads=1, head_dim=width, mla=True)
    if set(fields) == {"layers", "kv_heads", "head_dim"}:
        return _gqa(
            _number("model.layers", fields["layers"], _MAX_LAYERS),
            _number("model.kv_heads", fields["kv_heads"], _MAX_HEADS),
            _number("model.head_dim", fields["head_dim"], _MAX_WIDTH),
        )
    raise InputError("model", f"{short(text)} has not the fields of a model", f"use {form}")


def _from_config(path: Path) -> Geometry:
    """Read the fields that vLLM itself reads from a Hugging Face `config.json` (a nested `text_config` counts)."""
    place = f"model {path}"
    config = _config_at(place, path)

    def number(key: str, limit: int) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{place} {key}", f"{short(value)} is not a whole number", "use a number such as 8")
        return _within(f"{place} {key}", value, value, limit)

    layers = number("num_hidden_layers", _MAX_LAYERS)
    if config.get("kv_lora_rank") is not None:
        width = number("kv_lora_rank", _MAX_WIDTH) + number("qk_rope_head_dim", _MAX_WIDTH)
        return Geometry(layers=layers, kv_heads=1, head_dim=_within(f"{place} kv_lora_rank", width, width, _MAX_WIDTH), mla=True)
    heads = number("num_attention_heads", _MAX_HEADS)
    kv_heads = heads if config.get("num_key_value_heads") is None else number("num_key_value_heads", _MAX_HEADS)
    _within(f"{place} num_key_value_heads", kv_heads, kv_heads, heads)
    if config.get("head_dim") is not None:
        return _gqa(layers, kv_heads, number("head_dim", _MAX_WIDTH))
    hidden = number("hidden_size", 1 << 20)
    if hidden % heads:
        raise InputError(f"{place} hidden_size", f"{hidden} is no multiple of {heads} attention heads", "give head_dim too")
    return _gqa(layers, kv_heads, _within(f"{place} head_dim", hidden // heads, hidden // heads, _MAX_WIDTH))


def _config_at(place: str, path: Path) -> dict[str, Any]:
    """The dictionary in the file, or its `text_config`."""
    try:
        config = plain_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(place, f"can't be read: {error.strerror or error}", "give the path of a config.json") from None
    except UnfitJson as error:
        raise InputError(place, str(error), "give a Hugging Face config.json") from None
    except ValueError:
        raise InputError(place, "is not JSON", "give a Hugging Face config.json") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "num_hidden_layers" not in config:
        raise InputError(place, "has no num_hidden_layers", "give a Hugging Face config.json")
    return config
