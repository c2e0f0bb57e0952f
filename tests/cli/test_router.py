"""`kvcover router`: what people and scripts see of it."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvcover.sim.scenario.routers import ROUTERS

LEGS = {
    "prefill": {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
                "remote_dp_size": 1, "remote_tp_size": 1, "transfer_id": "tx-0123"},
    "decode": {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": None, "remote_block_ids": None,
               "remote_dp_size": 1, "remote_tp_size": 1, "transfer_id": "tx-0123"},
}  # fmt: skip
SIZES = ("--prefill", "tp=8", "--decode", "tp=8")


@pytest.fixture(autouse=True)
def legs_in_this_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "legs.json").write_text(json.dumps(LEGS))
    monkeypatch.chdir(tmp_path)


def test_check_says_what_is_wrong_and_what_works(kvcover: Any) -> None:
    code, out, err = kvcover("router", "check", "legs.json", "--release", "0.27.0,0.33.0", *SIZES)
    assert (code, err) == (0, "")
    assert "corrupt" in out
    assert "needed: prefill: remote_tp_size = 8, not 1" in out
    assert [line for line in out.splitlines() if len(line) > 80 and not line.startswith("{")] == []


def test_check_fails_if_asked_to(kvcover: Any) -> None:
    code, _, err = kvcover("router", "check", "legs.json", "--release", "0.24.0,0.27.0", *SIZES, "--check")
    assert code == 1
    assert err.startswith(
        "kvcover: check failed: 1 of 2 modes and releases are not as they should be, first write 0.27.0: outcome is"
    )
    assert kvcover("router", "check", "legs.json", "--release", "0.24.0", *SIZES, "--check")[0] == 0


def test_the_legs_that_work_pass(kvcover: Any) -> None:
    assert kvcover("router", "check", "legs.json", "--release", "0.27.0", *SIZES, "--legs-out", "right.json")[0] == 0
    assert kvcover("router", "check", "right.json", "--release", "0.27.0", *SIZES, "--check")[0] == 0
    assert kvcover("run", "--router", "right.json", "--release", "0.27.0", *SIZES, "--check")[0] == 0


def test_check_of_a_log_on_standard_input(kvcover: Any) -> None:
    log = f"INFO 12:00 kv_transfer_params: {LEGS['prefill']!r}\n"
    code, out, _ = kvcover("router", "check", "-", "--release", "0.27.0", *SIZES, "--json", stdin=log)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["mode"], line["filled"], line["outcome"]) for line in lines] == [
        ("write", ["decode"], "corrupt"), ("read", ["decode"], "ok")]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chek",), "command router 'chek': no such command; did you mean 'check'?"),
        (("check", "legs.jsn"), "legs.jsn: can't be read: No such file or directory"),
        (("check", "legs.json", "--release", "0.27"), "--release: no release '0.27'; did you mean '0.27.0'?"),
        (("check", "legs.json", "--mode", "push"), "--mode: no mode 'push'"),
        (("check", "legs.json", "--prefill", "tp=4,pod=2"), "--prefill: no size 'pod' in 'tp=4,pod=2'; did you mean 'pods'?"),
        (("check", "legs.json", "-o", "legs.json"), "-o: 'legs.json' is read by this run, and would be overwritten"),
        (("check", "/dev/zero"), "/dev/zero: is longer than 1 MiB"),
        (("check", "-"), "-: holds no legs; write"),
    ],
)
def test_bad_input_is_one_line(kvcover: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = kvcover("router", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvcover: {message}")
    assert err.count("\n") == 1


def is_source(line: str) -> bool:
    """Where the legs of a router come from that was not recorded."""
    name, colon, source = line.partition(": ")
    return bool(colon) and name in ROUTERS and source == ROUTERS[name].source


def test_compat_tells_a_table_that_can_be_opened(kvcover: Any) -> None:
    words = ("compat", "--release", "0.26.0,0.27.0", "--mode", "write", "--prefill", "1,2", "--decode", "1,2")
    code, out, err = kvcover(*words)
    assert (code, err) == (0, "")
    assert "equal TP only" in out
    assert [line for line in out.splitlines() if len(line) > 80 and not is_source(line)] == []
    _, out, _ = kvcover(*words, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert {(line["router"], line["release"]): line["works"] for line in lines}["vllm-router 0.1.15", "0.27.0"] == "P1→D1 only"
    _, out, _ = kvcover(
        "compat", "--router", "legs.json", "--release", "0.27.0", "--mode", "write", "--prefill", "2", "--decode", "2"
    )
    assert "write corrupt: kvcover run" in out
    _, out, _ = kvcover(*words, "--markdown")
    assert "| vllm-router 0.1.16 | P1→D1 only, else corrupt | equal TP only, else hang |" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--router", "nobody"), "router: no router 'nobody'"),
        (("--router", "legs.json"), "router: legs.json"),  # it has no legs for READ
        (("--release", "0.27"), "--release: no release '0.27'"),
        (("--tier", "conector"), "--tier: no tier 'conector'"),
        (("--prefill", "1,1"), "--prefill: 1 is given twice"),
        (("-o", "no/such/folder"), "-o: can't write"),
    ],
)
def test_bad_input_to_compat_is_one_line(kvcover: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = kvcover("compat", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvcover: {message}")


def test_keys_say_what_is_everybodys(kvcover: Any) -> None:
    code, out, err = kvcover("router", "keys", "--release", "0.27.0", "--mode", "write")
    assert (code, err) == (0, "")
    assert "crash for everybody if" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    _, out, _ = kvcover("router", "keys", "--release", "0.27.0", "--mode", "write", "--router", "legs.json", "--json")
    lines = {(line["leg"], line["key"], line["trouble"]): line for line in map(json.loads, out.splitlines())}
    assert lines["prefill", "remote_block_ids", "missing"]["everybody"] is True
    assert lines["prefill", "remote_block_ids", "null"]["outcome"] is None, "as it is sent"
    assert kvcover("router", "keys", "--router", "legs.json", "--mode", "read")[0] == 2


SERVE = "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --kv-transfer-config "
PREFILL, DECODE = (
    SERVE + "'" + json.dumps({"kv_connector": "MoRIIOConnector", "kv_role": role}) + "'" for role in ("kv_producer", "kv_consumer")
)


def test_diagnose_tells_causes_with_commands(kvcover: Any) -> None:
    words = ("diagnose", "--prefill", PREFILL, "--decode", DECODE, "--release", "0.27.0", "--seen", "accuracy")
    code, out, err = kvcover(*words, "--leg", repr(LEGS["prefill"]))
    assert (code, err) == (0, "")
    assert "1. as logged: the prefill leg is what vllm-router 0.1.15 sends: corrupt" in out
    assert "heals: vllm-router 0.1.16, the first version with which it is good" in out
    assert [line for line in out.splitlines() if len(line) > 80 and "kvcover run" not in line] == []
    _, again, _ = kvcover(*words, "--leg", "legs.json")
    assert "1. as logged: the prefill and decode leg is what vllm-router 0.1.15 sends" in again
    _, piped, _ = kvcover(*words, "--leg", "-", stdin=repr(LEGS["prefill"]))
    assert piped == out
    code, out, _ = kvcover(*words[:-1], "KeyError: 'nobody'")
    assert code == 0
    assert "nothing that kvcover models looks like" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill", DECODE, "--decode", DECODE, "--seen", "hang"), "--prefill: kv_role is 'kv_consumer'"),
        (("--prefill", PREFILL, "--decode", DECODE, "--seen", "hang", "--leg", "{'x': 1}"), "--leg: whose leg is"),
        (("--prefill", PREFILL, "--decode", DECODE, "--seen", "hang", "--leg", "none.txt"), "none.txt: can't be read"),
        (("--prefill", PREFILL, "--decode", DECODE), "Missing option '--seen'"),
    ],
)
def test_bad_input_to_diagnose_is_one_line(kvcover: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = kvcover("diagnose", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvcover: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "--prefill: no hop is given; write LISTEN=ENGINE such as"),
        (("--prefill", "127.0.0.1:1"), 2, "--prefill: can't read '127.0.0.1:1'; write LISTEN=ENGINE"),
        (("--decode", "127.0.0.1:x=127.0.0.1:1"), 2, "--decode: '127.0.0.1:x' is no HOST:PORT; write LISTEN=ENGINE"),
        (("--decode", "192.0.2.1:1234=127.0.0.1:1"), 2, "LISTEN: can't listen"),
        (("--prefill", "127.0.0.1:1=127.0.0.1:2", "-o", "no/such/folder"), 2, "-o: can't write"),
    ],
)
def test_bad_input_to_capture_is_one_line(kvcover: Any, words: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = kvcover("router", "capture", *words)
    assert (got, out) == (code, "")
    assert err.startswith(f"kvcover: {message}")
    assert err.count("\n") == 1


def test_a_capture_that_saw_nothing_is_inconclusive(kvcover: Any, tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = ("router", "capture", "--prefill", f"127.0.0.1:{port}=127.0.0.1:1", "--seconds", "0.2", "-o", "got.json")
    code, out, err = kvcover(*words)
    assert (code, out) == (3, "")
    assert err.splitlines()[-1] == "kvcover: inconclusive: no leg for prefill in 0.2 s"
    assert not (tmp_path / "got.json").exists()


FAKE = Path(__file__).parents[1] / "real" / "fake_router.py"


def fake(how: str) -> tuple[str, ...]:
    own = shlex.join([sys.executable, str(FAKE), how, "{port}", "{discovery}", "notes"])
    return ("router", "record", "--command", own, "--seconds", "4")


def test_record_writes_a_file_for_other_commands(kvcover: Any) -> None:
    code, out, err = kvcover(*fake("works")[:-1], "20", "--mode", "write", "-o", "got.json", "--recordings", "got.toml")
    assert code == 0, err
    legs = json.loads(out)
    assert legs == json.loads(Path("got.json").read_text())
    assert legs["write"]["prefill"]["remote_tp_size"] == "$decode.tp"
    assert legs["write"]["decode"]["remote_dp_size"] == "$prefill.dp"
    assert re.search(r"one request after another: 32 requests hit P0 (32, P1 0|0, P1 32), D0 .*; 1 of 4 pairs met, never P0-D", err)
    kept = tomllib.loads(Path("got.toml").read_text())
    assert {leg["side"] for leg in kept["leg"]} == {"prefill", "decode"}
    assert {leg.get("asked", "completions") for leg in kept["leg"]} == {
        "completions", "chat", "completions, streamed", "chat, streamed"}  # fmt: skip
    order = kept["choice"][0]["order"]
    assert len(order) == 32 and len(set(order)) == 1, "it takes whoever registered first"
    sizes = ("--release", "0.27.0", "--prefill", "tp=4", "--decode", "tp=4", "--model", "layers=1,mla=1")
    assert kvcover("run", "--router", "got.json", *sizes)[0] == 0


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("dies", 2, "kvcover: python3: it ended with exit code 3; it said 'no such connector: moriio'"),
        ("unregistered", 3, "kvcover: inconclusive: python3 answered 503 for 4 s"),
        ("hangs", 3, "kvcover: inconclusive: python3 took a request and did not answer in 4 s"),
    ],
)
def test_a_router_that_can_not_be_recorded(kvcover: Any, how: str, code: int, message: str) -> None:
    got, out, err = kvcover(*fake(how), "-o", "got.json")
    assert (got, out) == (code, "")
    assert re.sub(r"python[0-9.]*", "python3", err.splitlines()[-1]).startswith(message)
    assert not Path("got.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "ROUTER: give a router's name, or --command, and not both"),
        (("nginx",), "ROUTER: 'nginx' is no router that can be started; write 'vllm-router 0.1.17'"),
        (("vllm-router",), "ROUTER: '' is no version of vllm-router"),
        (("toy-proxy",), "ROUTER: 'toy-proxy': which vLLM's proxy?"),
        (("toy-proxy 0.1.0",), "ROUTER: no release '0.1.0'"),
        (("toy-proxy", "--vllm", "no/such"), "--vllm: 'no/such' has no examples/…/moriio_toy_proxy_server.py"),
        (("vllm-router 0.1.17", "--vllm", "."), "ROUTER: --vllm is for the toy proxy"),
        (("--command", "x"), "--command: 'x' has no {port} and no {discovery}"),
        (("vllm-router 0.1.17", "--mode", "push"), "--mode: no mode 'push'"),
        (("vllm-router 0.1.17", "--release", "0.27"), "--release: no release '0.27'"),
        (("vllm-router 0.1.17", "--options", "'x"), "--options: can't read"),
        (("--command", "x", "--options", "y"), "--options: means nothing beside --command"),
        (("vllm-router 0.1.17", "-o", "no/such/folder"), "-o: can't write"),
        (("vllm-router 0.1.17", "--recordings", "no/such/folder"), "--recordings: can't write"),
        (("vllm-router 0.1.14", "--check"), "--check: the package has no vllm-router 0.1.14 to compare with"),
    ],
)
def test_bad_input_to_record_is_one_line(kvcover: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = kvcover("router", "record", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvcover: {message}")
    assert err.count("\n") == 1
