"""`kvcover diagnose`: what an operator has, and the cause that public reports and docs/protocol.md give for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcover import InputError, build, run
from kvcover.sim.scenario.legs_file import parse_legs
from kvcover.sim.scenario.serve import scenario_of_serve
from kvcover.sim.search.diagnose import Cause, diagnose

LEG: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_dp_size": 1,
    "remote_tp_size": 1, "transfer_id": "tx-1",
}  # fmt: skip


def serve(side: str, tp: int, mode: str = "write", *flags: str) -> str:
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
    config = {"kv_connector": "MoRIIOConnector", "kv_role": role, "kv_connector_extra_config": {"read_mode": mode == "read"}}
    model = "vllm serve deepseek-ai/DeepSeek-R1"
    return f"{model} --tensor-parallel-size {tp} --kv-transfer-config '{json.dumps(config)}' {' '.join(flags)}"


def causes(release: str, seen: str, p: int = 8, d: int = 8, mode: str = "write", leg: dict[str, Any] | None = None) -> list[Cause]:
    fields, _ = scenario_of_serve(serve("prefill", p, mode), serve("decode", d, mode), "layers=2,mla=64+16")
    own = None if leg is None else parse_legs(json.dumps(leg), "--leg", mode)
    return diagnose(build(fields | {"release": release, "fabric": "loopback"}), own, seen)


def repairs(cause: Cause) -> list[str]:
    return [repair.text for repair in cause.repairs]


def test_the_rank_collapse() -> None:
    """vllm#47764: accuracy zero at TP8/TP8; 0.27.0 is the first release that reads the key."""
    first = causes("0.26.0", "accuracy")[0]
    assert (first.assumed, first.outcome, first.coverage) == ("", "corrupt", 0.125)
    assert repairs(first)[0].startswith("vLLM 0.27.0, the first release")
    assert any(text.startswith("set:tp_size=8@prefill") for text in repairs(first))


def test_a_logged_leg_names_the_router_that_sent_it() -> None:
    """router#192: 0.1.15 sends 1, 0.1.16 the size."""
    first = causes("0.27.0", "accuracy", leg=LEG)[0]
    assert first.assumed == "as logged: the prefill leg is what vllm-router 0.1.15 sends"
    assert (first.outcome, first.coverage) == ("corrupt", 0.125)
    assert "vllm-router 0.1.16, the first version with which it is good" in repairs(first)


def test_a_hang_with_a_larger_decode() -> None:
    """F5: it needs 0.33.0, or equal sizes."""
    first = causes("0.27.0", "hang", 4, 8)[0]
    assert (first.assumed, first.outcome) == ("", "hang")
    assert repairs(first)[0].startswith("vLLM 0.33.0, the first release")
    assert "--tensor-parallel-size 4 on decode" in repairs(first)


def test_accuracy_that_only_time_saves() -> None:
    """vllm#48534: READ has no barrier up to 0.27.0, and under full CUDA graphs up to 0.30.0."""
    old = causes("0.27.0", "accuracy", mode="read")[0]
    assert (old.assumed, old.outcome) == ("", "race")
    assert repairs(old)[0].startswith("vLLM 0.28.0, the first release")
    new = causes("0.30.0", "accuracy", mode="read")[0]
    assert (new.assumed, new.outcome) == ("if decode runs under full CUDA graphs", "race")
    assert repairs(new)[:2] == ["vLLM 0.31.0, the first release with which it is good", "--enforce-eager on decode"]


def test_the_line_of_a_crash() -> None:
    """K24: up to 0.27.0 a missing id is a KeyError; a line that no run has is nobody's."""
    leg = {key: value for key, value in LEG.items() if key != "transfer_id"} | {"remote_tp_size": 8}
    found = causes("0.27.0", "  File moriio_common.py, line 1\nKeyError: 'transfer_id'", leg=leg)
    assert found[0].outcome == "crash"
    assert found[0].findings[0].text == "P died: KeyError: 'transfer_id'"
    assert "without drop:transfer_id@prefill" in repairs(found[0])
    assert causes("0.27.0", "KeyError: 'nobody_reads_this'", leg=leg) == []


@pytest.mark.parametrize(
    ("release", "seen", "sizes"), [("0.26.0", "accuracy", (8, 8)), ("0.27.0", "hang", (4, 8)), ("0.33.0", "hang", (2, 2))]
)
def test_what_is_said_to_heal_is_good_when_it_is_run(release: str, seen: str, sizes: tuple[int, int]) -> None:
    import shlex

    from kvcover.sim.commands.options import scenario_data
    from kvcover.sim.commands.run import command

    for cause in causes(release, seen, *sizes):
        for repair in cause.repairs:
            context = command.make_context("run", shlex.split(repair.command)[2:])
            options = context.params
            data = scenario_data(None, options)
            for side in ("prefill", "decode"):
                text = options.pop(side)
                tp = {"tp": int(text.partition("=")[2].partition(",")[0])} if text else {}
                data[side] = {**data.get(side, {}), **tp}
            data |= {"mode": options["mode"]} if options["mode"] else {}
            assert run(build(data)).outcome == "ok", repair.text


def test_command_lines() -> None:
    config = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_consumer"}
    text = (
        "VLLM_MORIIO_CONNECTOR_READ_MODE=1 vllm serve --model /models/DeepSeek-R1-0528 -tp=2 -dp 4 --data-parallel-size-local 2"
        " --block-size 64 --kv-cache-dtype fp8_e4m3 --enforce-eager --speculative-config '{\"num_speculative_tokens\": 3}' --port 8000"
        f" --kv-transfer-config '{json.dumps(config)}' --trust-remote-code"
    )
    fields, notes = scenario_of_serve(serve("prefill", 8, "read"), text)
    assert fields["decode"] == {
        "tp": 2,
        "dp": 4,
        "pods": 2,
        "block_size": 64,
        "kv_dtype": "fp8",
        "cuda_graphs": "none",
        "lookahead_tokens": 3,
    }
    assert (fields["mode"], fields["model"], notes) == ("read", "deepseek-r1", [])
    assert build(fields).prefill.tp == 8


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (serve("prefill", 8), serve("decode", 8, "read"), "read_mode: prefill is in WRITE, decode in READ"),
        (serve("decode", 8), serve("decode", 8), "--prefill: kv_role is 'kv_consumer'; it is kv_producer on this side"),
        (serve("prefill", 8), "vllm serve x -tp eight", "--decode: --tensor-parallel-size 'eight' is no number"),
        (serve("prefill", 8), "vllm serve 'x", "--decode: can't be read as a command line"),
        ("vllm serve x --kv-transfer-config '{'", "vllm serve x", "--prefill: --kv-transfer-config is not JSON"),
        (
            "vllm serve x --kv-cache-dtype fp9",
            "vllm serve x",
            "--prefill: --kv-cache-dtype 'fp9' is not known; did you mean 'fp8'?",
        ),
        ("vllm serve org/unknown-model", "vllm serve org/unknown-model", "--model: no preset for 'org/unknown-model'"),
        ("vllm serve", "vllm serve", "--model: neither command line names a model"),
    ],
)
def test_a_bad_command_line_is_one_line(prefill: str, decode: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        scenario_of_serve(prefill, decode)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
