"""`router record`: real routers between stub engines, and what becomes of routers that don't do their work."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.real_backend.driver.trial import Role
from kvcover.real_backend.router import program
from kvcover.real_backend.router.files import leg_tables
from kvcover.real_backend.router.heartbeat import frame
from kvcover.real_backend.router.program import Program, own_command, program_of
from kvcover.real_backend.router.record import PLAIN, Ask, Exchange, Shape, fail_a_leg, forgets_after, record
from kvcover.real_backend.router.stub_engine import SeenLeg
from kvcover.real_backend.router.templates import differences, fitted, grid, legs_as_file
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.errors import Inconclusive, InputError, TierError
from kvcover.sim.scenario.legs_file import MODES, parse_legs
from kvcover.sim.scenario.routers import ROUTERS, own_router

RECORDED: list[dict[str, Any]] = tomllib.loads((Path(__file__).parents[1] / "data" / "router_legs.toml").read_text())["leg"]
FAKE = Path(__file__).with_name("fake_router.py")
SHAPE = Shape(mode="write", prefill=(4, 1), decode=(8, 2))


def command(how: str, notes: Path) -> str:
    return shlex.join([sys.executable, str(FAKE), how, "{port}", "{discovery}", str(notes)])


def check_all_gone(notes: Path) -> None:
    """The router's process and its child are no more, and its ports are free."""
    for line in notes.read_text().splitlines():
        pid, child, *ports = (int(word) for word in line.split())
        assert [each for each in (pid, child) if Path(f"/proc/{each}").exists()] == []
        for port in ports:
            with socket.create_server(("127.0.0.1", port), reuse_port=False):
                pass


def test_both_legs_are_noted_whatever_was_asked(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    asks = [PLAIN, Ask(stream=True), Ask(chat=True), Ask(chat=True, stream=True)]
    found = record(own_command(command("works", notes)), SHAPE, asks, 10.0)
    assert [(each.prefill.path, each.decode.request["stream"]) for each in found] == [(ask.path, ask.stream) for ask in asks]
    for each in found:
        assert each.prefill.params is not None and each.decode.params is not None
        assert each.prefill.params["remote_tp_size"] == 8, "what decode registered"
        assert (each.decode.params["remote_tp_size"], each.decode.params["remote_dp_size"]) == (4, 1)
        assert each.prefill.params["transfer_id"] == each.decode.params["transfer_id"]
        assert each.prefill.headers["x-request-id"].startswith("fake-")
    assert len({each.decode.params["transfer_id"] for each in found if each.decode.params}) == len(asks)
    check_all_gone(notes)


def test_a_port_that_somebody_took_is_tried_otherwise(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert len(record(own_command(command("port-taken", notes)), SHAPE, [PLAIN], 10.0)) == 1
    assert len(notes.read_text().splitlines()) == 3
    check_all_gone(notes)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_that_fails_is_seen_with_what_the_client_got(role: Role, tmp_path: Path) -> None:
    trouble = fail_a_leg(own_command(command("works", tmp_path / "notes")), SHAPE, role, 10.0)
    assert trouble.status == 0, "this one drops the connection"
    assert [leg.role for leg in trouble.legs] == (["prefill"] if role == "prefill" else ["prefill", "decode"])


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("dies", TierError, "it ended with exit code 3; it said 'no such connector: moriio'"),
        ("dies-later", TierError, "it ended with exit code 101; it said 'panicked at a request'"),
        ("deaf", Inconclusive, "did not listen on its port in 1.5 s"),
        ("unregistered", Inconclusive, 'answered 503 for 1.5 s: {"error": "no engines are registered"}'),
        ("hangs", Inconclusive, "took a request and did not answer in 1.5 s"),
        ("no-legs", Inconclusive, "answered, and no leg came to prefill and decode in 1.5 s"),
    ],
)
def test_a_router_that_does_not_do_its_work(how: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    notes, began = tmp_path / "notes", time.monotonic()
    with pytest.raises(error) as told:
        record(own_command(command(how, notes)), SHAPE, [PLAIN], 1.5, start_s=1.5 if how == "deaf" else 20.0)
    assert words in str(told.value)
    assert time.monotonic() - began < 40
    check_all_gone(notes)


def test_a_leg_without_parameters_is_no_recording(tmp_path: Path) -> None:
    found = record(own_command(command("no-params", tmp_path / "notes")), SHAPE, [PLAIN], 10.0)
    with pytest.raises(Inconclusive, match="the prefill leg of fake has no kv_transfer_params"):
        fitted("fake", found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router --port {port}", "has no {discovery}"),
        ("'router {port} {discovery}", "can't read"),
        ("no-such-router {port} {discovery}", "there is no program 'no-such-router'"),
    ],
)
def test_bad_commands(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        own_command(text)
    assert message in str(error.value)


PROXY = """
import threading

def start_service_discovery(host, port):
    assert host == "127.0.0.1"
    print("registrations at", port, flush=True)

class app:
    @staticmethod
    def run(host, port):
        from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOConstants
        raise SystemExit(f"{host} {MoRIIOConstants.TRANSFER_PREFIX} {MoRIIOConstants.PING_INTERVAL}")
"""


def a_tree(
    tmp_path: Path, proxy: str = PROXY, common: str = "class MoRIIOConstants:\n    TRANSFER_PREFIX = 'tx'\n    PING_INTERVAL = 3\n"
) -> Path:
    folder = tmp_path / "vllm" / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "moriio"
    for each, name, text in (
        (folder, "moriio_common.py", "import torch\n" + common),
        (tmp_path / "examples" / "x", "moriio_toy_proxy_server.py", proxy),
    ):
        each.mkdir(parents=True)
        (each / name).write_text(text)
    return tmp_path


def test_a_trees_own_proxy_runs_with_its_constants_and_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start-up block, which would listen on every address, is not run; neither is torch imported."""
    monkeypatch.setattr(program, "_environment", lambda *_words: Path(sys.executable))
    proxy = program_of("toy-proxy", str(a_tree(tmp_path)), [], print)
    with pytest.raises(TierError) as told:
        record(proxy, SHAPE, [PLAIN], 10.0)
    assert str(told.value) == f"toy-proxy of {tmp_path}: it ended with exit code 1; it said '127.0.0.1 tx 3'"


@pytest.mark.parametrize(
    ("common", "message"),
    [("x = 1\n", "has no MoRIIOConstants"), ("class MoRIIOConstants(:\n", "is no Python")],
)
def test_a_tree_of_which_no_proxy_can_be_made(common: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TierError, match=message):
        program_of("toy-proxy", str(a_tree(tmp_path, common=common)), [], print)


def test_a_long_frame_has_eight_bytes_of_length() -> None:
    assert frame(b"x" * 255) == b"\x00\xff" + b"x" * 255
    assert frame(b"x" * 256) == b"\x02" + bytes(6) + b"\x01\x00" + b"x" * 256


# -- from legs to templates --------------------------------------------------------------------------------------


def as_sent_by(name: str) -> list[Exchange]:
    """What the stubs would have noted, had the package's own templates of a router been sent to them."""
    router, found = ROUTERS[name], []
    for number, shape in enumerate(shape for shape in grid() for _ in range(2)):
        (p_tp, p_dp), (d_tp, d_dp) = shape.prefill, shape.decode
        ranks = {"prefill": number % p_dp, "decode": (number + 1) % d_dp}
        values = {"prefill.tp": p_tp, "prefill.dp": p_dp, "decode.tp": d_tp, "decode.dp": d_dp, "transfer_id": f"tx-{number}"}
        values |= {f"{side}.dp_rank": rank for side, rank in ranks.items()}
        more = 90 if shape.odd else 0
        reply = {"remote_block_ids": [1], "remote_engine_id": "e", "tp_size": p_tp + more, "remote_dp_size": p_dp + more,
                 "do_remote_prefill": not shape.odd, "do_remote_decode": shape.odd, "remote_dp_rank": ranks["prefill"],
                 "transfer_id": "tx-answered" if shape.odd else f"tx-{number}"}  # fmt: skip
        answered = reply if shape.mode == "read" else None
        params = {"prefill": router.prefill_leg(shape.mode, values), "decode": router.decode_leg(shape.mode, values, answered)}

        def leg(role: Any, sent: Any, rank: int | None, answer: Any) -> SeenLeg:
            headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
            return SeenLeg(role=role, instance=0, path="/v1/completions", headers=headers, request={}, params=sent, reply=answer)

        to_decode = ranks["prefill"] if router.decode_follows else ranks["decode"]
        found.append(Exchange(shape=shape, ask=PLAIN,
                              prefill=leg("prefill", params["prefill"], ranks["prefill"] if p_dp > 1 else None, answered),
                              decode=leg("decode", params["decode"], to_decode if (p_dp if router.decode_follows else d_dp) > 1 else None, None)))  # fmt: skip
    return found


@pytest.mark.parametrize("name", [name for name, router in ROUTERS.items() if router.recorded])
def test_templates_are_found_again(name: str) -> None:
    """From legs of all sizes back to what they were made of, as far as any deployment can tell; also through a file."""
    exchanges, known = as_sent_by(name), ROUTERS[name]
    found, notes = fitted(name, exchanges)
    assert notes == []
    assert differences(found, exchanges) == differences(known, exchanges) == []
    assert [found.legs(mode) for mode in MODES] == [known.legs(mode) for mode in MODES]
    assert (found.pins, found.decode_follows, found.forwards_response) == (
        known.pins,
        known.decode_follows,
        known.forwards_response,
    )
    again = own_router(parse_legs(json.dumps(legs_as_file(found)), "legs.json"), name, "legs.json")
    assert differences(again, exchanges) == []
    assert again.pins == known.pins


def test_a_value_that_nothing_explains_is_told_and_left_out() -> None:
    exchanges = as_sent_by("vllm-router 0.1.16")
    for number, each in enumerate(exchanges):
        assert each.prefill.params is not None
        each.prefill.params["nonce"] = number
        if number % 3 == 0:
            each.prefill.params["remote_pp_size"] = 1
    found, notes = fitted("odd", exchanges)
    assert found.write_prefill is not None and not {"nonce", "remote_pp_size"} & set(found.write_prefill)
    assert notes[0].startswith("write prefill leg: nonce = 0, 1, 2, 3")
    assert "remote_pp_size = 1, on some legs only" in notes[1]


def test_another_router_differs_by_key_and_sizes() -> None:
    exchanges = as_sent_by("vllm-router 0.1.16")
    told = differences(ROUTERS["vllm-router 0.1.15"], exchanges)
    assert told[0] == ("write prefill leg, P TP4 DP1 → D TP8 DP1: remote_tp_size is 8, and vllm-router 0.1.15 has 1")


PATIENT = {"transfer_timeout_s": 20.0, "defer_timeout_s": 25.0}
"""Nothing waits for them here, and sixteen ranks take their time on a busy machine."""

# -- real programs -----------------------------------------------------------------------------------------------


def installed(router: str) -> Program:
    """The real router, or a skip that says why not."""
    try:
        return program_of(router, None, [], print)
    except TierError as error:
        pytest.skip(f"NOT RUN: {error}")


def recorded_before(table: dict[str, Any], router: str) -> dict[str, Any] | None:
    """The leg of `tests/data/router_legs.toml` that stands for the same router, mode, side, sizes and answer."""
    for leg in RECORDED:
        same = all(leg[key] == table[key] for key in ("mode", "side", "prefill", "decode"))
        answers = "engine_releases" not in table or table["engine_releases"][0] in leg.get("engine_releases", ())
        if same and answers and leg["router"] == router and "options" not in leg:
            return leg
    return None


@pytest.mark.slow
def test_a_router_sends_what_it_sent_when_it_was_recorded_before() -> None:
    """vllm-router 0.1.16, the first with true TP sizes, against legs that other stubs and another harness recorded."""
    name = "vllm-router 0.1.16"
    router = installed(name)
    exchanges = [each for shape in grid() for each in record(router, shape, [PLAIN], 20.0)]
    compared = 0
    for table in leg_tables(name, exchanges, "today"):
        if (before := recorded_before(table, name)) is not None:
            assert json.loads(table["params"]) == json.loads(before["params"])
            assert table["headers"]["x-request-id"] == before["headers"]["x-request-id"]
            assert table["request"] == before["request"]
            compared += 1
    assert compared == 16, "both legs of four sizes and two modes"
    found, notes = fitted(name, exchanges)
    assert (notes, differences(found, exchanges), differences(ROUTERS[name], exchanges)) == ([], [], [])


@pytest.mark.slow
@pytest.mark.vllm
def test_the_routers_version_decides_on_the_real_connector(trees: Path, tmp_path: Path) -> None:
    """P TP8 → D TP8 in WRITE on 0.27.0, whose connector is right: 0.1.15 says that its peer has one rank, 0.1.16 the truth."""
    assert (trees / "0.27.0").is_dir()
    scenarios = []
    for version in ("0.1.15", "0.1.16"):
        router = installed(f"vllm-router {version}")
        exchanges = [each for shape in grid(["write"]) for each in record(router, shape, [PLAIN], 20.0)]
        path = tmp_path / f"{version}.json"
        path.write_text(json.dumps(legs_as_file(fitted(router.name, exchanges)[0])))
        scenarios.append(build({"release": "0.27.0", "prefill": {"tp": 8}, "decode": {"tp": 8}, "model": "layers=2,mla=64+16",
                                "router": str(path), "fabric": "loopback", "timers": PATIENT}))  # fmt: skip
    expected = [("corrupt", 0.125), ("ok", 1.0)]
    assert [(result.outcome, result.coverage) for result in map(run, scenarios)] == expected
    assert [(result.outcome, result.coverage) for result in connector_tier.many(scenarios)] == expected


# Which of two legs fails, by mode: the client's status, and which legs were sent in all, P and D; a new letter is a new transfer.
# None tries again, and the toy proxy answers 200 for a prefill leg that failed in WRITE and for a decode leg that failed.
HONEST = {("write", "prefill"): (500, "D0 P0"), ("write", "decode"): (503, "D0 P0"),
          ("read", "prefill"): (500, "P0"), ("read", "decode"): (503, "D0 P0")}  # fmt: skip
TOY = HONEST | {("write", "prefill"): (200, "D0 P0"), ("write", "decode"): (200, "D0 P0"), ("read", "decode"): (200, "D0 P0")}
FAILURES = {"vllm-router 0.1.16": HONEST, "vllm-router 0.1.17": HONEST, "toy-proxy 0.33.0": TOY}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_what_real_routers_make_of_a_leg_that_fails(name: str) -> None:
    router = installed(name)
    for (mode, role), expected in FAILURES[name].items():
        shape = Shape(mode=mode, prefill=(1, 1), decode=(1, 1))
        trouble = fail_a_leg(router, shape, "prefill" if role == "prefill" else "decode", 20.0)
        transfers = list(dict.fromkeys((leg.params or {}).get("transfer_id") for leg in trouble.legs))
        sent = sorted(f"{leg.role[0].upper()}{transfers.index((leg.params or {}).get('transfer_id'))}" for leg in trouble.legs)
        assert (mode, role, trouble.status, " ".join(sent)) == (mode, role, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm-router 0.1.17", "toy-proxy 0.33.0"])
def test_real_routers_forget_as_the_package_says(name: str) -> None:
    """They count whole seconds, and the last heartbeat may be half a second old."""
    expiry_s = ROUTERS[name].registration_expiry_s
    after_s = forgets_after(installed(name), Shape(mode="write", prefill=(1, 1), decode=(1, 1)), "decode", 15.0)
    assert (after_s is None) == (expiry_s is None)
    assert after_s is None or expiry_s is None or abs(after_s - expiry_s) < 2.5
