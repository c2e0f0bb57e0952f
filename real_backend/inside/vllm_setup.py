"""Make one process ready for one vLLM release, and build the configurations that its connector reads.

vLLM has no types here: its modules are reached by name, so that this package can be checked and imported without it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcover.real_backend.driver.processes import HOST as HOST
from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.trial import Role, Trial
from kvcover.real_backend.inside.mori_kind import describe_library
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.cache.layers import Group
from kvcover.sim.errors import InputError
from kvcover.sim.results.result import STAND_IN

LOOPBACK = Path(__file__).parents[1] / "moriio" / "loopback"
MORIIO_FOLDER = "vllm/distributed/kv_transfer/kv_connector/v1/moriio"
MORIIO = MORIIO_FOLDER.replace("/", ".")
_MOST_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One DP rank of one engine, for both sides of its connector. `vllm` and `kv_cache` are vLLM's own objects."""

    role: Role
    dp_rank: int
    vllm: Any
    kv_cache: Any
    group: Any
    """The same without data parallelism: each DP rank's TP group is a world of its own here."""


def user_cache() -> Path:
    """The folder of this user's for what kvcover keeps: `$KVCOVER_CACHE`, else `kvcover` in the user's cache folder."""
    try:
        if own := os.environ.get("KVCOVER_CACHE"):
            return Path(own).expanduser()
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache") / "kvcover"
    except RuntimeError as error:  # no home folder, or that of a user who isn't there
        raise InputError("KVCOVER_CACHE", f"no folder can be told: {error}", "name a folder by all of its path") from None


def prepare(tree: Path | None, read_abort_s: float, device: str = "cpu", mori: Path | None = None) -> None:
    """Import vLLM from `tree` in this process, with the `mori.io` in a folder (None: the stand-in). Call once, before a fork.

    On `cpu` it runs on this machine's memory, and doesn't see what GPUs there are. On `cuda` torch's events and streams are
    those of the GPU. `tree` None means the vLLM that is installed.

    Raises FileNotFoundError if `tree` holds no vLLM with a MoRI-IO connector.
    """
    if tree is not None and not (tree / MORIIO_FOLDER).is_dir():
        raise FileNotFoundError(f"{tree}: no vLLM source tree with a MoRI-IO connector")
    paths = [*([str(mori)] if mori else []), str(LOOPBACK), *([str(tree)] if tree else [])]
    sys.path[:0] = paths
    os.environ.update(
        # vLLM inspects model classes in a subprocess, which must find the same tree.
        PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        OMP_NUM_THREADS="1",
        VLLM_HOST_IP=HOST,
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="kvcover",  # loopback/kvcover_platform.py
        VLLM_TARGET_DEVICE="empty",  # newer releases take `cpu` for an answer, and ask no plugin
        VLLM_SSM_CONV_STATE_LAYOUT="DS",  # the only one that the connector takes
        VLLM_MORIIO_TRANSFER_TIMEOUT_S=str(math.ceil(read_abort_s)),
    )
    if device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        _stand_in_for_cuda()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM keeps what it found out about a model class, ten seconds' work, in one file for all releases: one a tree lasts.
    kept = hashlib.sha256(str(tree).encode()).hexdigest()[:12]
    os.environ.setdefault("VLLM_CACHE_ROOT", str(user_cache() / "vllm-state" / kept))
    connector: Any = importlib.import_module(f"{MORIIO}.moriio_connector")
    drop_legacy_timeout()
    # A source tree has no kernels, and vLLM would warn of that in each rank, as if it were the run's fault.
    platform: Any = importlib.import_module("vllm.platforms.interface").UnspecifiedPlatform
    platform.import_kernels = classmethod(lambda _class: None)
    # Only the backend's name is used, and there is none for a machine without kernels.
    connector.get_attn_backend = lambda *_args, **_kwargs: _AttentionBackend()


def drop_legacy_timeout() -> None:
    """Take the timeout out of the environment where the connector has a setting for it, as it warns of the old way."""
    config = importlib.import_module(f"{MORIIO}.moriio_common").MoRIIOConfig
    if "recv_abort_timeout" in config.__annotations__:
        os.environ.pop("VLLM_MORIIO_TRANSFER_TIMEOUT_S", None)


def describe(tree: Path | None, mori: Path | None = None) -> dict[str, Any]:
    """Say what was imported: versions, and a hash of the connector's files. `mori` is the folder of a real `mori.io`."""
    vllm = importlib.import_module("vllm")
    torch: Any = importlib.import_module("torch")
    folder = Path(str(vllm.__file__)).parents[1]
    files = sorted((folder / MORIIO_FOLDER).glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "vllm": tree_version(folder) or str(getattr(vllm, "__version__", "unknown")),
        "connector_sha256": digest.hexdigest()[:16],
        "connector_files": connector_files(folder),
        "torch": str(torch.__version__),
        "rocm": getattr(torch.version, "hip", None),
        **(describe_library(mori) if mori else {"mori": STAND_IN}),
        "head_axis": has_head_axis(),
        "python": sys.version.split()[0],
        "installed": tree is None,
    }


def connector_files(tree: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a tree's connector, by name."""
    files = sorted((tree / MORIIO_FOLDER).glob("*.py"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def tree_version(tree: Path) -> str | None:
    """Return the version that a source tree says it is; None for a working copy that doesn't."""
    for folder in sorted(tree.glob("vllm-*.dist-info")):
        return folder.name.removeprefix("vllm-").removesuffix(".dist-info").split("+")[0]
    return version_file(tree)


def version_file(tree: Path) -> str | None:
    """Return the version in a tree's `vllm/_version.py`, which its build wrote; None if there is none."""
    version = tree / "vllm/_version.py"
    found = (
        re.search(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", version.read_text(), re.M) if version.exists() else None
    )
    found = found or (re.search(r"""__version__.* = ['"]([^'"]+)['"]""", version.read_text()) if version.exists() else None)
    return found[1].split("+")[0] if found else None


def connector_class() -> Any:
    """Return the release's connector class."""
    return importlib.import_module(f"{MORIIO}.moriio_connector").MoRIIOConnector


def connector_role(name: str) -> Any:
    """Return vLLM's connector role of that name, WORKER or SCHEDULER."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return base.KVConnectorRole[name]


def has_head_axis() -> bool:
    """Tell whether the release's latent caches are [blocks, 1, tokens, latent]: those whose specs count states do."""
    return hasattr(importlib.import_module("vllm.v1.kv_cache_interface").AttentionSpec, "num_states")


def torch_dtype(kv_dtype: str) -> Any:
    """Return the type of a cache's values; vLLM keeps fp8 in bytes."""
    names = {"fp8": "uint8", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return getattr(importlib.import_module("torch"), names[kv_dtype])


class _AttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "NONE"


class _Event:
    """A CUDA event on a machine without CUDA: work is done when it is issued."""

    def record(self, stream: object = None) -> None:
        """Mark the stream's current position."""

    def synchronize(self) -> None:
        """Wait for that position."""


def _stand_in_for_cuda() -> None:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *_args, **_kwargs: None


class ConfigFactory:
    """Builds configurations for one release. The first model of a kind takes seconds, all others milliseconds."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder, self._device = folder, device
        self._models: dict[tuple[Geometry, int], Any] = {}

    def engine(self, trial: Trial, role: Role, dp_rank: int, ports: Ports) -> EngineConfig:
        """Return the configuration of one DP rank of one engine."""
        config = importlib.import_module("vllm.config")
        endpoint, geometry = trial.endpoint(role), trial.setup.geometry
        transfer = config.KVTransferConfig(
            kv_connector="MoRIIOConnector",
            kv_role="kv_producer" if role == "prefill" else "kv_consumer",
            kv_connector_extra_config=_connector_settings(trial, ports),
            kv_load_failure_policy=endpoint.side.load_failure,
        )

        cache = config.CacheConfig(block_size=endpoint.shape.block_size, enable_prefix_caching=not geometry.has_states)
        cache.num_gpu_blocks = endpoint.shape.num_blocks  # states are in no prefix cache unless one asks for that

        steps = {"max_num_batched_tokens": _MOST_TOKENS, "max_model_len": _MOST_TOKENS, "max_num_seqs": 256}

        def build(dp: int, rank: int) -> Any:
            return config.VllmConfig(
                model_config=self._model(geometry, math.lcm(16, geometry.kv_heads, endpoint.tp)),
                cache_config=cache,
                parallel_config=config.ParallelConfig(
                    tensor_parallel_size=endpoint.tp,
                    data_parallel_size=dp,
                    data_parallel_rank=rank,
                    data_parallel_size_local=dp,
                    distributed_executor_backend="mp",
                ),
                scheduler_config=config.SchedulerConfig(**steps, is_encoder_decoder=False, async_scheduling=False),
                device_config=config.DeviceConfig(self._device),
                kv_transfer_config=transfer,
            )

        vllm = build(endpoint.dp, dp_rank)
        kv_cache = _kv_cache_config(trial, role, vllm)
        return EngineConfig(role, dp_rank, vllm, kv_cache, vllm if endpoint.dp == 1 else build(1, 0))

    def _model(self, geometry: Geometry, query_heads: int) -> Any:
        if (geometry, query_heads) not in self._models:
            text = json.dumps(_hf_config(geometry, query_heads))
            folder = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(text)
            model_config = importlib.import_module("vllm.config").ModelConfig
            self._models[geometry, query_heads] = model_config(
                model=str(folder),
                tokenizer=str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=_MOST_TOKENS,
            )
        return self._models[geometry, query_heads]


def layer_names(model: Geometry) -> list[str]:
    """Return the names under which a rank registers its caches."""
    return [f"model.layers.{index}.self_attn.attn" for index in range(model.layers)]


def _connector_settings(trial: Trial, ports: Ports) -> dict[str, Any]:
    return {
        "host_ip": HOST,
        "proxy_ip": "",  # no heartbeat
        "proxy_ping_port": 1,
        "http_port": ports.http,
        "handshake_port": ports.handshake,
        "notify_port": ports.notify,
        "read_mode": trial.setup.scenario.mode == "read",
        "transfer_timeout": trial.limits.transfer_s,
        "defer_timeout": trial.limits.defer_s,
        "recv_abort_timeout": trial.limits.read_abort_s,
    }


def _kv_cache_config(trial: Trial, role: Role, vllm: Any) -> Any:
    """Sort the layers into cache groups, with vLLM's hybrid KV cache manager on unless the scenario or the release says off."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    endpoint = trial.endpoint(role)
    if not trial.alike:
        hybrid = _hybrid(trial, role)
        # On a platform without kernels vLLM turns the manager off; what decides it on ROCm is the connector alone.
        if hybrid and not _supports_hybrid() and not trial.setup.geometry.has_states:
            raise ValueError("this vLLM turns its hybrid KV cache manager off for this connector")
        vllm.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    specs = _layer_specs(trial, role)
    groups = []
    for table in range(len(endpoint.tables)):
        mine = {name: spec for (name, spec), (group, _) in zip(specs.items(), endpoint.places, strict=True)
                if endpoint.groups[group].table == table}  # fmt: skip
        first = next(iter(mine.values()))
        same = all(spec == first for spec in mine.values())
        groups.append(interface.KVCacheGroupSpec(list(mine), first if same else interface.UniformTypeKVCacheSpecs.from_specs(mine)))
    return interface.KVCacheConfig(num_blocks=endpoint.shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _hybrid(trial: Trial, role: Role) -> bool:
    """Whether vLLM's hybrid KV cache manager is on."""
    endpoint = trial.endpoint(role)
    return endpoint.side.hybrid_kv and (trial.setup.geometry.has_states or endpoint.release.hybrid_manager == "on")


def _supports_hybrid() -> bool:
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base, "SupportsHMA") and issubclass(connector_class(), base.SupportsHMA)


def _layer_specs(trial: Trial, role: Role) -> dict[str, Any]:
    """Return vLLM's description of each layer's cache."""
    endpoint = trial.endpoint(role)
    specs = [_layer_spec(trial, role, group) for group in endpoint.groups]
    return {name: specs[group] for name, (group, _) in zip(layer_names(trial.setup.geometry), endpoint.places, strict=True)}


def _layer_spec(trial: Trial, role: Role, group: Group) -> Any:
    """Return vLLM's description of the cache of a layer; without the hybrid manager a window is full attention."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    if group.geometry.state:
        return _state_spec(group)
    fields = {
        "block_size": group.shape.block_size,
        "num_kv_heads": group.shape.heads,
        "head_size": group.geometry.head_dim,
        "dtype": torch_dtype(trial.kv_dtype(role)),
    }
    if group.geometry.mla:
        return interface.MLAAttentionSpec(**fields)
    if window := trial.endpoint(role).tables[group.table].window:
        return interface.SlidingWindowSpec(**fields, sliding_window=window)
    return interface.FullAttentionSpec(**fields)


def _state_spec(group: Group) -> Any:
    """Return a state as Mamba 1 has it: convolution and the rest with a row a head, in one page."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    float32 = importlib.import_module("torch").float32
    backends = importlib.import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum
    part = (group.shape.heads, group.geometry.head_dim)
    fields: dict[str, Any] = {"block_size": _MOST_TOKENS, "shapes": (part, part), "dtypes": (float32, float32)}
    return interface.MambaSpec(**fields, mamba_type=backends.MAMBA1)


def refuse_states(trial: Trial, config: EngineConfig) -> None:
    """Let vLLM refuse recurrent states where its hybrid KV cache manager is off, as it does before a connector is made."""
    if not trial.setup.geometry.has_states or (_supports_hybrid() and _hybrid(trial, config.role)):
        return
    unify = "unify_hybrid_kv_cache_specs"
    module = importlib.import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(module, unify):  # 0.33+
        module = importlib.import_module("vllm.v1.core.kv_cache_planning")
    getattr(module, unify)(_layer_specs(trial, config.role))


def _hf_config(geometry: Geometry, query_heads: int) -> dict[str, Any]:
    """Return a config.json: llama-like, or deepseek-like for a latent cache. Only its KV geometry is ever used."""
    common = {
        "hidden_size": math.lcm(128, query_heads),
        "intermediate_size": 128,
        "num_hidden_layers": geometry.layers,
        "vocab_size": 512,
        "max_position_embeddings": _MOST_TOKENS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if not geometry.mla:
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_attention_heads": query_heads,
            "num_key_value_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
        }
    width = geometry.head_dim
    rope = 64 if width > 320 else max(1, width // 5)
    return common | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": query_heads,
        "num_key_value_heads": query_heads,
        "kv_lora_rank": width - rope,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
    }
