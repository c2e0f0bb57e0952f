"""A router's legs in the user's own file: what may stand there, what is made general, and bad files in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, build, run
from kvcover.sim.scenario.legs_file import parse_legs
from kvcover.sim.scenario.routers import ROUTERS, get_router

PREFILL: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_dp_size": 1, "remote_tp_size": 4, "transfer_id": "tx-0123",
}  # fmt: skip
DECODE: dict[str, Any] = PREFILL | {"do_remote_decode": False, "do_remote_prefill": True}
READ_DECODE: dict[str, Any] = {
    "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "10.0.0.1:6301", "remote_block_ids": [[11, 12, 13]],
    "remote_host": "10.0.0.1", "remote_handshake_port": "6301", "remote_notify_port": "61005", "remote_dp_size": 1, "tp_size": 4,
    "transfer_id": "tx-0123",
}  # fmt: skip
MLA = "layers=2,mla=64+16"


def write(folder: Path, data: Any, name: str = "legs.json") -> str:
    file = folder / name
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


def outcome(router: str, **fields: Any) -> tuple[str, float]:
    sizes: dict[str, Any] = {"release": "0.27.0", "prefill": {"tp": 4}, "decode": {"tp": 4}, "model": MLA}
    result = run(build({**sizes, "router": router, **fields}))
    return result.outcome, result.coverage


def test_legs_as_logged_do_what_the_router_that_sent_them_does(tmp_path: Path) -> None:
    right = write(tmp_path, {"prefill": PREFILL, "decode": DECODE}, "right.json")
    ones = {"remote_tp_size": 1}
    wrong = write(tmp_path, {"prefill": PREFILL | ones, "decode": DECODE | ones}, "wrong.json")
    assert outcome(right) == outcome("vllm-router 0.1.16") == ("ok", 1.0)
    assert outcome(wrong) == outcome("vllm-router 0.1.15") == ("corrupt", 0.25)
    assert outcome(right, requests=3) == ("ok", 1.0), "each request has an id of its own, and not the one that was logged"


def test_a_logged_read_leg_names_blocks_of_another_run(tmp_path: Path) -> None:
    """Up to 0.27.0 READ has no barrier: what comes in time is up to the fabric, so that a newer release is asked."""
    file = write(tmp_path, {"prefill": PREFILL, "decode": READ_DECODE})
    for release in ("0.28.0", "0.33.0"):  # one list of blocks, and one a group
        assert outcome(file, release=release, mode="read", fabric="loopback") == ("ok", 1.0)


def test_templates_over_the_registered_sizes(tmp_path: Path) -> None:
    legs = {
        "prefill": PREFILL | {"transfer_id": "$transfer_id", "remote_tp_size": "$decode.tp"},
        "decode": DECODE | {"transfer_id": "$transfer_id", "remote_tp_size": "$prefill.tp"},
    }
    file = write(tmp_path, {"write": legs})
    for tp in (1, 2, 8):
        assert outcome(file, prefill={"tp": tp}, decode={"tp": tp}) == ("ok", 1.0)
    assert get_router(file, "0.27.0").legs("write") == (legs["prefill"], legs["decode"])


def test_every_recorded_router_can_be_written_as_a_file(tmp_path: Path) -> None:
    for router in ROUTERS.values():
        legs = {mode: dict(zip(("prefill", "decode"), router.legs(mode), strict=True)) for mode in ("write", "read")}
        own = get_router(write(tmp_path, {**legs, "forwards_response": router.forwards_response}), "0.27.0")
        assert [own.legs(mode) for mode in ("write", "read")] == [router.legs(mode) for mode in ("write", "read")]


def test_two_dollars_are_one(tmp_path: Path) -> None:
    file = write(tmp_path, {"prefill": PREFILL | {"note": "$$5"}, "decode": DECODE})
    values = {"transfer_id": "t", "decode.dp": 1}
    assert get_router(file, "0.27.0").prefill_leg("write", values)["note"] == "$5"


@pytest.mark.parametrize(
    "text",
    [
        f"INFO kv_transfer_params={PREFILL!r}\nINFO kv_transfer_params={DECODE!r} (request 1)\n",
        "\n".join(json.dumps({"model": "m", "kv_transfer_params": leg}) for leg in (PREFILL, DECODE)),
        json.dumps([PREFILL, DECODE]),
        f"prefill = '''{PREFILL}'''\ndecode = '''{json.dumps(DECODE)}'''\n",
    ],
    ids=["log lines", "bodies, one a line", "a list", "TOML with text"],
)
def test_the_forms_in_which_people_have_legs(text: str) -> None:
    legs = parse_legs(text, "-").legs
    general = {"transfer_id": "$transfer_id"}
    assert legs == {("write", "prefill"): PREFILL | general, ("write", "decode"): DECODE | general}


def test_what_was_one_requests_is_said() -> None:
    own = parse_legs(json.dumps({"prefill": PREFILL | {"remote_host": "10.0.0.2"}, "decode": READ_DECODE}), "-")
    assert list(own.legs) == [("read", "prefill"), ("read", "decode")]
    assert own.legs["read", "decode"]["remote_block_ids"] == "$response.remote_block_ids"
    assert "remote_host" not in own.legs["read", "prefill"]
    assert len(own.notes) == 7
    assert own.notes[0] == "transfer_id: each request has its own"


def test_two_ids_stay_two(tmp_path: Path) -> None:
    """A router that gives each leg an id of its own: decode waits for a transfer that nobody makes."""
    file = write(tmp_path, {"prefill": PREFILL, "decode": DECODE | {"transfer_id": "tx-4567"}})
    assert outcome(file)[0] == "hang"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "legs.json: holds no legs; write"),
        ("{", "legs.json: is not JSON: Expecting property name"),
        ("[]", "legs.json: holds no legs"),
        ('{"prefil": {}}', "legs.json: prefil: no such field; did you mean 'prefill'?"),
        ('{"prefill": 3}', "legs.json: prefill: 3 is no table; write one"),
        ('{"prefill": "nothing"}', "legs.json: prefill: 'nothing' holds no dictionaries"),
        ('{"write": {"decoder": {}}}', "legs.json: write.decoder: no such leg; did you mean 'decode'?"),
        ('{"write": []}', "legs.json: write: [] is no table of legs"),
        ('{"mode": "push", "prefill": {}}', "legs.json: mode: no mode 'push'"),
        ('{"prefill": {}, "forwards_response": 1}', "legs.json: forwards_response: 1 is wrong; expected true or false"),
        ('{"prefill": {"remote_tp_size": "$decode.tpp"}, "decode": {}}', "stands for nothing; did you mean '$decode.tp'?"),
        ('{"prefill": {"tp_size": "$response.tp_size"}, "decode": {}}', "write.prefill.tp_size: '$response.tp_size': prefill's answer"),
        ('{"prefill": {"a": 1, "a": 2}}', "legs.json: gives 'a' more than once"),
        ('{"do_remote_decode": true, "do_remote_prefill": true}', "whose leg is {'do_remote_decode': True"),
        ('[{"do_remote_decode": true}, {"do_remote_decode": true, "x": 1}]', "holds two different legs for prefill"),
        ('{"prefill": {}}', "router: legs.json"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        outcome("legs.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mode_that_the_file_lacks_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no prefill leg for READ; it has write\.prefill, write\.decode"):
        outcome(write(tmp_path, {"prefill": PREFILL, "decode": DECODE}), mode="read")


def test_a_name_that_is_neither_says_both() -> None:
    with pytest.raises(InputError, match=r"no router 'vllm-ruter 0.1.16'; did you mean 'vllm-router 0.1.16'\?, or a file"):
        get_router("vllm-ruter 0.1.16", "0.27.0")
