"""The connector with its caches in GPU memory, over the stand-in: device tensors, events, streams, IPC handles.

Needs a GPU that torch sees, and trees of vLLM; any number of ranks share one GPU. With `KVCOVER_KEPT` set to a folder each
result is kept there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario
from tests.real.linked_tree import linked_tree
from tests.real.test_connector_tier import needs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))), reason="NOT RUN: no GPU (/dev/nvidia0 or /dev/kfd)"
    ),
]
MLA, HEADS = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8"


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOVER_DEVICE", "cuda")


def scenario(release: str, prefill: int, decode: int, mode: str, model: str, **more: Any) -> Scenario:
    sides = {"prefill": {"tp": prefill}, "decode": {"tp": decode}}
    common = {"release": release, "mode": mode, "model": model, "prompt_tokens": 64, "fabric": "loopback"}
    return build(common | sides | more)


def on_gpu(asked: list[Scenario], name: str, vllm: str | None = None) -> list[Result]:
    results = list(connector_tier.many(asked, [vllm] * len(asked)))
    if kept := os.environ.get("KVCOVER_KEPT"):
        (Path(kept) / f"{name}.jsonl").write_text("".join(result.to_json() + "\n" for result in results))
    for result in results:
        backend = getattr(result, "backend", {})
        assert (result.tier, backend["device"], backend["mori"]) == ("connector", "cuda", "loopback")
        assert backend["prefill_vllm"]["device"].startswith("cuda: ")
    return results


def coverage(result: Result) -> list[float | None]:
    return [rank.coverage for rank in result.by_rank]


@pytest.mark.parametrize("release", ["0.26.0", "0.27.0", "0.33.0"])
def test_coverage_is_that_of_the_model(release: str) -> None:
    needs(release)
    pairs = [(8, 8), (4, 2), (2, 4)]
    cases = [(*pair, mode, model) for pair in pairs for mode in ("write", "read") for model in (MLA, HEADS)]
    asked = [scenario(release, *case) for case in cases]
    results = dict(zip(cases, on_gpu(asked, release), strict=True))
    expected = dict(zip(cases, map(run, asked), strict=True))
    if release != "0.33.0" and results[2, 4, "write", HEADS].outcome == "hang":
        # MoRI refuses the batch. Where the write waited for a kernel it fails in the writer's thread, which only logs it.
        del results[2, 4, "write", HEADS]
    assert {case: result.outcome for case, result in results.items()} == {case: expected[case].outcome for case in results}
    if release == "0.26.0":  # eight ranks of other heads write over each other in one: any may win
        del results[8, 8, "write", HEADS]
    assert {case: coverage(result) for case, result in results.items()} == {case: coverage(expected[case]) for case in results}


WAIT = "task.event.synchronize()"


@pytest.mark.parametrize("release", ["0.27.0", "0.33.0"])
@pytest.mark.parametrize("waits", [True, False], ids=["with-the-event", "without"])
def test_a_layer_still_being_computed_leaks_only_without_the_connectors_event(release: str, waits: bool, tmp_path: Path) -> None:
    """Prefill's kernels run on when `save_kv_layer` is called; decode's blocks are known by then, so each write is due at once."""
    needs(release)
    asked = scenario(release, 2, 2, "write", MLA, faults=["delay-leg:prefill,ms=500"])
    if waits:
        (result,) = on_gpu([asked], f"{release}-event-kept")
        assert (result.outcome, result.coverage) == ("ok", 1.0)
        return
    engine = f"{MORIIO_FOLDER}/moriio_engine.py"
    tree = linked_tree(tmp_path, release, engine)
    text = (tree / engine).read_text()
    assert text.count(WAIT) == 1
    (tree / engine).write_text(text.replace(WAIT, "pass"))
    (result,) = on_gpu([asked], f"{release}-event-removed", str(tree))
    assert result.outcome == "corrupt"
    assert result.coverage is not None
    assert result.coverage < 1.0
