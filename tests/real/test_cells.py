"""Which layer and request an address in a rank's cache belongs to, against where numpy says that a cell lies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvcover import build
from kvcover.real_backend.driver.trial import Role
from kvcover.real_backend.inside.cells import TAG_BYTES, cells_of
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.tiers.translate import to_trial

GQA, MLA = "layers=2,kv_heads=4,head_dim=8", "layers=2,mla=64+16"
WINDOWS = "layers=4,kv_heads=4,head_dim=8,window=32,full_every=2"
STATES = "layers=4,kv_heads=4,head_dim=8,state=4x6,state_every=2"
CACHES: list[tuple[str, dict[str, Any]]] = [
    (GQA, {}),
    (GQA, {"order": "HND"}),
    (GQA, {"layout": "interleaved"}),
    (GQA, {"layout": "interleaved", "order": "HND"}),
    (GQA, {"layout": "packed"}),
    (GQA, {"layout": "standard"}),
    (MLA, {"layout": "latent"}),
    (MLA, {"layout": "standard"}),
    (WINDOWS, {}),
    (STATES, {}),
    (GQA, {"dp": 2}),
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "engine"), CACHES)
def test_every_tag_of_every_cell_is_of_its_request(model: str, engine: dict[str, Any], role: Role) -> None:
    side = {"tp": 2, **engine}
    fields = {"mode": "read", "model": model, "prefill": side, "decode": side, "prompt_tokens": 64, "requests": 4}
    trial = to_trial(build({**fields, "block_size": 16, "kv_dtype": "fp32"}))
    for dp in range(side.get("dp", 1)):
        made = Injection(trial, role, dp, "any", {})
        pool = iter(range(1, trial.endpoint(role).shape.num_blocks))
        for request in trial.setup.requests:
            if dp == (request.prefill_dp if role == "prefill" else request.decode_dp):
                rows = trial.endpoint(role).rows(request.prompt_tokens)
                tables = tuple((0,) * skipped + tuple(itertools.islice(pool, count - skipped)) for skipped, count in rows)
                made.learn({request.index: tables})
        start = 4096  # of the first layer; the next begins where it ends
        for layer, (group, _) in enumerate(trial.endpoint(role).places):
            cells = cells_of(trial, role, 1)[group]
            memory = np.zeros(int(np.prod(cells.memory()[0])), dtype=np.int32)
            made.layers = [*made.layers, (start, memory.nbytes)]
            view = cells.view(memory)
            owner: dict[int, int] = {}
            for _, index, tables in made.given:
                owner |= {block: index for block in tables[cells.group.table] if block}
            for block in range(view.shape[1]):
                view[:, block] = owner.get(block, -1) + 1
            found = [made.cell_of(start + TAG_BYTES * place) for place in range(memory.size)]
            assert found == [(layer, int(tag) - 1) for tag in memory]
            start += memory.nbytes
        assert made.cell_of(start) == (-1, -1)


def test_a_block_that_is_used_again_is_of_whoever_had_it_by_then() -> None:
    trial = to_trial(build({"model": GQA, "requests": 2, "prompt_tokens": 16, "kv_dtype": "fp32"}))
    made = Injection(trial, "decode", 0, "any", {})
    (cells,) = cells_of(trial, "decode", 0)
    memory = np.zeros(int(np.prod(cells.memory()[0])), dtype=np.int32)
    view = cells.view(memory)
    view[:, 1] = 1
    made.layers = [(0, memory.nbytes)]
    address = TAG_BYTES * int(memory.argmax())
    assert made.cell_of(address) == (0, -1)
    made.learn({0: ((1,),)})
    first = made.given[-1][0]
    made.learn({0: ((1, 2),)})
    made.learn({1: ((1,),)})
    assert [made.cell_of(address, at) for at in (first - 1, first, None)] == [(0, -1), (0, 0), (0, 1)]
