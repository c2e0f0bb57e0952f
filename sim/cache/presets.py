"""Models by name, each with its source, and models from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults.read import UnfitJson, plain_int, plain_json
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.files import MB, read_text

DTYPE_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_MAX_LAYERS, _MAX_HEADS, _MAX_WIDTH, _MAX_WINDOW, _MAX_STATE = 1024, 1024, 1 << 16, 1 << 24, 1 << 24


# Public defaults of Hugging Face's Gemma2Config and Gemma3TextConfig: every second, every sixth layer attends to all tokens.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}


class Preset(msgspec.Struct, frozen=True):
    """A named model and the public place where its numbers stand."""

    name: str
    geometry: Geometry
    source: str


def _sliding(layers: int, kv_heads: int, head_dim: int, window: int, full_every: int) -> Geometry:
    """Every `full_every`-th layer attends to all tokens, the others to the last `window`."""
    full = Geometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    rest = msgspec.structs.replace(full, window=window)
    return msgspec.structs.replace(rest, minor=full, minor_layers=tuple(range(full_every - 1, layers, full_every)))


def _gqa(layers: int, kv_heads: int, head_dim: int) -> Geometry:
    return Geometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim)


def _with_states(layers: int, kv_heads: int, head_dim: int, state: Geometry, full_every: int) -> Geometry:
    """Every `full_every`-th layer attends to all tokens, the others keep a state."""
    rest = tuple(layer for layer in range(layers) if (layer + 1) % full_every)
    return msgspec.structs.replace(_gqa(layers, kv_heads, head_dim), minor=state, minor_layers=rest)


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
        Preset(
            "gemma-3-27b",
            _sliding(62, 16, 128, 1024, 6),
            "huggingface.co/google/gemma-3-27b-it config.json, text_config: num_hidden_layers 62, num_key_value_heads 16, "
            "head_dim 128, sliding_window 1024; every 6th layer attends to all tokens",
        ),
        Preset(
            "gpt-oss-120b",
            _sliding(36, 8, 64, 128, 2),
            "huggingface.co/openai/gpt-oss-120b config.json: num_hidden_layers 36, num_key_value_heads 8, head_dim 64, "
            "sliding_window 128, layer_types sliding and full in turn",
        ),
        Preset(
            "qwen3-next-80b-a3b",
            _with_states(48, 2, 256, Geometry(layers=48, kv_heads=16, head_dim=17152, state=True), 4),
            "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct config.json: num_hidden_layers 48, num_key_value_heads 2, head_dim "
            "256, full_attention_interval 4; else a state of linear_num_key_heads 16, linear_num_value_heads 32, both of head "
            "dimension 128, linear_conv_kernel_dim 4",
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


_FORM = "layers=2,kv_heads=8,head_dim=8 or layers=2,mla=64+16"
_NUMBERS = {
    "layers": _MAX_LAYERS, "kv_heads": _MAX_HEADS, "head_dim": _MAX_WIDTH, "window": _MAX_WINDOW,
    "full_every": _MAX_LAYERS, "mla_every": _MAX_LAYERS, "gqa_every": _MAX_LAYERS, "state_every": _MAX_LAYERS,
}  # fmt: skip
_TEXTS = ("mla", "state")
_GQA = {"layers", "kv_heads", "head_dim"}
_MODELS = (
    {"layers", "mla"}, _GQA, _GQA | {"window"}, _GQA | {"window", "full_every"},
    _GQA | {"mla", "mla_every"}, _GQA | {"mla", "gqa_every"},
    _GQA | {"state", "state_every"}, {"layers", "mla", "state", "state_every"},
)  # fmt: skip


def _from_numbers(text: str) -> Geometry:
    """A model from `name=number` parts: which parts make a model, `_MODELS` says.

    Every `full_every`-th layer attends to all tokens; every `mla_every`-th layer of a GQA model has an MLA latent; every
    `gqa_every`-th layer of an MLA model has K and V; every `state_every`-th layer keeps a recurrent state.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name in fields:
            raise InputError("model", f"can't read {short(part)} in {short(text)}", f"use {_FORM}")
        if name not in (*_NUMBERS, *_TEXTS):
            raise InputError("model", f"no field {short(name)} in {short(text)}", nearest(name, (*_NUMBERS, *_TEXTS)))
        fields[name] = value
    if set(fields) not in _MODELS:
        raise InputError("model", f"{short(text)} has not the fields of a model", _nearest_model(set(fields)))
    n = {name: _number(f"model.{name}", fields[name], limit) for name, limit in _NUMBERS.items() if name in fields}
    layers = n["layers"]
    mla = _latent(layers, fields["mla"]) if "mla" in fields else None
    if set(fields) == {"layers", "mla"}:
        assert mla is not None
        return mla
    gqa = None
    if "kv_heads" in n:
        gqa = Geometry(layers=layers, kv_heads=n["kv_heads"], head_dim=n["head_dim"], window=n.get("window", 0))
    state = _state(layers, fields["state"]) if "state" in fields else None
    for field, main, minor in (
        ("full_every", gqa, None if gqa is None else msgspec.structs.replace(gqa, window=0)),
        ("mla_every", gqa, mla),
        ("gqa_every", mla, gqa),
        ("state_every", gqa or mla, state),
    ):
        if field in n and main is not None:
            every = _within(f"model.{field}", n[field], n[field], layers)
            if state is not None and every == 1:
                raise InputError("model.state_every", "1 leaves no layer that attends", "use 2 or more")
            return _mixed(main, minor, range(every - 1, layers, every))
    assert gqa is not None
    return gqa


def _state(layers: int, text: str) -> Geometry:
    """A recurrent state from `HEADSxWIDTH`: so many heads, each of WIDTH elements for the convolution and as many for the rest."""
    heads, cross, width = text.partition("x")
    if not cross:
        raise InputError("model.state", f"{short(text)} is not heads x width", "use a state such as 8x64")
    return Geometry(
        layers=layers,
        kv_heads=_number("model.state", heads, _MAX_HEADS),
        head_dim=_number("model.state", width, _MAX_STATE),
        state=True,
    )


def _nearest_model(given: set[str]) -> str:
    """What to change in the names of a model's parts so that they make one."""
    if given <= _GQA | {"mla"}:
        return f"use {_FORM}"
    best = min(_MODELS, key=lambda model: (len(model ^ given), len(given - model)))
    order = (*_NUMBERS, *_TEXTS)
    changes = [("add", best - given), ("leave out", given - best)]
    return " and ".join(f"{verb} {', '.join(sorted(names, key=order.index))}" for verb, names in changes if names)


def _latent(layers: int, text: str) -> Geometry:
    width = sum(_number("model.mla", part, _MAX_WIDTH) for part in text.split("+"))
    return Geometry(layers=layers, kv_heads=1, head_dim=_within("model.mla", text, width, _MAX_WIDTH), mla=True)


def _mixed(main: Geometry, minor: Geometry | None, layers: Iterable[int]) -> Geometry:
    """A model of which some layers are of another kind; of that kind alone if all are."""
    found = tuple(layers)
    if minor is None or not found:
        return main
    return minor if len(found) == main.layers else msgspec.structs.replace(main, minor=minor, minor_layers=found)


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
    if indexed := next((key for key in _INDEXER if config.get(key) is not None), None):
        text = "an indexer keeps a cache of its own beside each layer's, which can't be modelled"
        raise InputError(f"{place} {indexed}", text, f"use {_plain_form(config)} to leave it out")
    states = _state_layers(place, config, layers)
    if states and config.get("kv_lora_rank") is not None:
        raise InputError(f"{place} kv_lora_rank", "MLA beside recurrent states can't be read", _state_form(config))
    if config.get("kv_lora_rank") is not None:
        width = number("kv_lora_rank", _MAX_WIDTH) + number("qk_rope_head_dim", _MAX_WIDTH)
        return Geometry(layers=layers, kv_heads=1, head_dim=_within(f"{place} kv_lora_rank", width, width, _MAX_WIDTH), mla=True)
    heads = number("num_attention_heads", _MAX_HEADS)
    kv_heads = heads if config.get("num_key_value_heads") is None else number("num_key_value_heads", _MAX_HEADS)
    _within(f"{place} num_key_value_heads", kv_heads, kv_heads, heads)
    if config.get("head_dim") is not None:
        width = number("head_dim", _MAX_WIDTH)
    else:
        hidden = number("hidden_size", 1 << 20)
        if hidden % heads:
            raise InputError(f"{place} hidden_size", f"{hidden} is no multiple of {heads} attention heads", "give head_dim too")
        width = _within(f"{place} head_dim", hidden // heads, hidden // heads, _MAX_WIDTH)
    full = _gqa(layers, kv_heads, width)
    if states:
        return _mixed(full, _linear_state(layers, number), states)
    if (attending := _full_layers(place, config, layers)) is None:
        return full
    return _mixed(msgspec.structs.replace(full, window=number("sliding_window", _MAX_WINDOW)), full, attending)


_INDEXER = ("index_topk", "index_head_dim", "index_n_heads")


def _plain_form(config: dict[str, Any]) -> str:
    """The attention of a config in the form that `--model` takes, as far as the file says it."""

    def told(*names: str) -> Any:
        return next((config[name] for name in names if isinstance(config.get(name), int)), "N")

    if config.get("kv_lora_rank") is not None:
        return f"layers={told('num_hidden_layers')},mla={told('kv_lora_rank')}+{told('qk_rope_head_dim')}"
    heads, hidden = told("num_attention_heads"), told("hidden_size")
    width = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else "N"
    return (
        f"layers={told('num_hidden_layers')},kv_heads={told('num_key_value_heads', 'num_attention_heads')},"
        f"head_dim={config['head_dim'] if isinstance(config.get('head_dim'), int) else width}"
    )


def _state_form(config: dict[str, Any]) -> str:
    return f"use {_plain_form(config)},state=HEADSxWIDTH,state_every=N with the state's own numbers"


# What configs of models with recurrent states have, and no others.
_STATE_FIELDS = (
    "attn_layer_indices", "attn_layer_period", "hybrid_override_pattern", "layers_block_type", "linear_attn_config",
    "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "mamba_config", "ssm_cfg", "ssm_state_size", "state_size",
    "full_attention_interval", "attn_type_list", "block_types", "time_mix_extra_dim", "linear_num_value_heads",
)  # fmt: skip


def _state_layers(place: str, config: dict[str, Any], layers: int) -> list[int]:
    """The layers that keep a recurrent state; none in most models.

    Read from `layer_types` with "linear_attention", or `full_attention_interval`, as Qwen3-Next has them. Any other sign of
    recurrent states is refused, so that such a model is never taken for plain attention.
    """
    types = config.get("layer_types")
    kinds = set(types) if isinstance(types, list) and all(isinstance(kind, str) for kind in types) else set()
    signs = [key for key in _STATE_FIELDS if config.get(key) is not None and not _says_attention(key, config[key])]
    if not signs and kinds <= {"full_attention", "sliding_attention"}:
        return []
    readable = all(config.get(key) is not None for key in _LINEAR) and not set(signs) - {*_LINEAR, "full_attention_interval"}
    if not readable or kinds - {"linear_attention", "full_attention"}:
        named = f"layer_types {short(sorted(kinds))}" if kinds - {"full_attention", "sliding_attention"} else signs[0]
        raise InputError(f"{place} {named.partition(' ')[0]}", f"layers with a recurrent state can't be read from {named}",
                         _state_form(config))  # fmt: skip
    if kinds:
        if len(types or ()) != layers:
            raise InputError(f"{place} layer_types", f"{short(types)} is no list of {layers} types", "name each layer's type")
        return [layer for layer, kind in enumerate(types or ()) if kind == "linear_attention"]
    every = config.get("full_attention_interval")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"{place} full_attention_interval", f"{short(every)} is no count of layers", "use a number such as 4")
    return [layer for layer in range(layers) if (layer + 1) % every]


def _says_attention(key: str, value: Any) -> bool:
    """Whether a field that hybrid models have says that all layers attend: MiniMax-M2's list of 1, where 0 is linear attention."""
    return key == "attn_type_list" and isinstance(value, list) and set(map(repr, value)) == {"1"}


_LINEAR = (
    "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


def _linear_state(layers: int, number: Callable[[str, int], int]) -> Geometry:
    """The state of a gated delta net: as many heads as keys have, which is what limits TP.

    The convolution keeps all but one of its kernel's last inputs (keys, queries and values), the rest is a matrix of key by
    value a value head (vLLM's mamba_utils.py, `gated_delta_net_state_shape`).
    """
    values, keys, key_dim, value_dim, kernel = (number(key, _MAX_WIDTH) for key in _LINEAR)
    conv = (2 * keys * key_dim + values * value_dim) * (kernel - 1)
    each = -(-(conv + values * value_dim * key_dim) // (2 * keys))
    return Geometry(layers=layers, kv_heads=keys, head_dim=each, state=True)


def _full_layers(place: str, config: dict[str, Any], layers: int) -> list[int] | None:
    """The layers that attend to all tokens, of a model with a sliding window; None: it has none.

    `layer_types` says it layer by layer. Older configs leave it to the model class, of which `_FULL_EVERY` has two.
    """
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    types = config.get("layer_types")
    if types is None:
        every = config.get("sliding_window_pattern", _FULL_EVERY.get(str(config.get("model_type"))))
        if every is None:
            return []
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InputError(f"{place} sliding_window_pattern", f"{short(every)} is no count of layers", "use a number such as 6")
        return list(range(every - 1, layers, every))
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers:
        raise InputError(f"{place} layer_types", f"{short(types)} is no list of {layers} types", f"use {' and '.join(known)}")
    for kind in types:
        if kind not in known:
            raise InputError(f"{place} layer_types", f"{short(kind)} can't be modelled", f"use {' and '.join(known)}")
    return [layer for layer, kind in enumerate(types) if kind == "full_attention"]


_MOST_BYTES = 4 * MB


def _config_at(place: str, path: Path) -> dict[str, Any]:
    """The dictionary in the file, or its `text_config`."""
    try:
        config = plain_json(read_text(path, _MOST_BYTES, "give the path of a config.json"))
    except UnfitJson as error:
        raise InputError(place, str(error), "give a Hugging Face config.json") from None
    except ValueError:
        raise InputError(place, "is not JSON", "give a Hugging Face config.json") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "num_hidden_layers" not in config:
        raise InputError(place, "has no num_hidden_layers", "give a Hugging Face config.json")
    return config
