"""A result as a real tier would give it, of what the model says: for tests of what is made of results, not of what they say."""

from __future__ import annotations

import json
from typing import Any

from kvcover import build, run
from kvcover.real_backend.machine.hashes import KNOWN

ENVIRONMENT = {"kvcover": "0.1.0", "python": "3.12.9", "torch": "2.9.1", "rocm": None}


def real_result(release: str, tier: str = "connector", **scenario: Any) -> dict[str, Any]:
    """The dictionary of a result, as it stands in a file."""
    result: dict[str, Any] = json.loads(run(build({**scenario, "release": release})).to_json())
    engine = {"vllm": release, "connector_files": dict(KNOWN[release]), "connector_sha256": "0" * 16, "identity": release}
    backend: dict[str, Any] = {"mori": "loopback", "prefill_vllm": engine, "decode_vllm": dict(engine), "environment": ENVIRONMENT}
    if tier == "hardware":
        backend |= {"mori": "amd-mori 1.2.3 over rdma", "launcher": "torchrun", "self_test": "passed: in this double"}
    replay = f"{result['replay']} --tier {tier}"
    return result | {"tier": tier, "digest": None, "virtual_ns": None, "backend": backend, "replay": replay}
