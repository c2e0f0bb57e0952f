"""Bad input: one line on stderr that names the place, the value and the nearest right one, exit code 2, nothing else.

Each case is (arguments, fragments that the line must hold). `{NAME}` in an argument is a file made by `folder`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, resolve
from kvcover.sim.cli import main
from kvcover.sim.scenario.scenario import set_field

Case = tuple[list[str], list[str]]

_GQA = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
_TWO_BLOCKS = "prompt_tokens = 32\n"
_DIGITS = "9" * 5000


def _config(**changes: Any) -> str:
    return json.dumps({key: value for key, value in {**_GQA, **changes}.items() if value != "absent"})


FILES: dict[str, str | bytes] = {
    # not a scenario at all
    "empty.json": "",
    "binary.toml": bytes(range(256)),
    "zeros.toml": bytes(64),
    "latin1.toml": 'release = "é"\n'.encode("latin-1"),
    "broken.toml": 'mode = "write\n',
    "broken.json": '{"mode": "write",}',
    "toml_in.json": 'mode = "write"\n',
    "json_in.toml": '{"mode": "write"}',
    "list.json": "[1, 2]",
    "number.json": "3",
    "null.json": "null",
    "deep.json": "[" * 100_000 + "]" * 100_000,
    "deep.toml": "faults = " + "[" * 5000 + "]" * 5000 + "\n",
    "twice.toml": 'mode = "write"\nmode = "read"\n',
    "twice.json": '{"mode": "write", "mode": "read"}',
    "digits.json": '{"seed": ' + _DIGITS + "}",
    "digits.toml": f"seed = {_DIGITS}\n",
    # one field of a scenario wrong
    "relase.toml": 'relase = "0.26.0"\n',
    "tpp.toml": "[prefill]\ntpp = 8\n",
    "prompt_token.toml": "[[requests]]\nprompt_token = 8\n",
    "legg.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nlegg = "prefill"\n',
    "expect_x.json": '{"expect": {"outcom": "ok"}}',
    "date.toml": "release = 2026-01-01\n",
    "prefill_int.toml": "prefill = 4\n",
    "prefill_list.json": '{"prefill": [4]}',
    "prefill_text.toml": 'prefill = "tp=4"\n',
    "tp_text.toml": 'prefill = {tp = "4"}\n',
    "tp_float.toml": "decode = {tp = 4.0}\n",
    "tp_bool.json": '{"decode": {"tp": true}}',
    "nan.toml": "[timers]\ndefer_timeout_s = nan\n",
    "inf.json": '{"timers": {"transfer_timeout_s": Infinity}}',
    "overrides_int.toml": "overrides = 3\n",
    "override_int.toml": "[overrides]\nports = 3\n",
    "faults_text.toml": 'faults = "drop:remote_tp_size"\n',
    "fault_int.toml": "faults = [3]\n",
    "fault_kind.toml": '[[faults]]\nkind = "dorp"\nkey = "transfer_id"\n',
    "fault_no_key.toml": '[[faults]]\nkind = "drop"\n',
    "fault_empty_key.toml": '[[faults]]\nkind = "drop"\nkey = ""\n',
    "fault_leg.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nleg = "both"\n',
    "fault_no_new.toml": '[[faults]]\nkind = "rename"\nkey = "transfer_id"\n',
    "fault_value.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nvalue = 1\n',
    "fault_request.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nrequests = [9]\n',
    "fault_minus.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nrequests = [-1]\n',
    "fault_nobody.toml": '[[faults]]\nkind = "drop"\nkey = "transfer_id"\nrequests = []\n',
    "fault_date.toml": '[[faults]]\nkind = "set"\nkey = "transfer_id"\nvalue = 2026-01-01\n',
    "blocks_twice.toml": _TWO_BLOCKS + "[[requests]]\nprefill_blocks = [1, 1]\n",
    "blocks_few.toml": _TWO_BLOCKS + "[[requests]]\ndecode_blocks = [1]\n",
    "blocks_minus.toml": _TWO_BLOCKS + "[[requests]]\nprefill_blocks = [-1, 2]\n",
    "blocks_huge.toml": _TWO_BLOCKS + "[[requests]]\nprefill_blocks = [1, 2000000]\n",
    "blocks_high.toml": _TWO_BLOCKS + "prefill = {num_blocks = 10}\n[[requests]]\nprefill_blocks = [1, 20]\n",
    "blocks_zero.toml": _TWO_BLOCKS + "[[requests]]\nprefill_blocks = [0, 2]\n",
    "dp_rank.toml": "[[requests]]\nprefill_dp = 1\n",
    "dp_rank_2.toml": "decode = {dp = 2}\n[[requests]]\ndecode_dp = 2\n",
    "no_requests.toml": "requests = []\n",
    "requests_bool.toml": "requests = true\n",
    "schema.toml": "schema = 2\n",
    "outcome.toml": '[expect]\noutcome = "good"\n',
    "coverage.toml": "[expect]\ncoverage = 1.5\n",
    "by_rank.toml": "[expect]\nby_rank = [1.0, -0.5]\n",
    "surrogate.json": '{"prefill": {"host": "\\ud800"}}',
    # config.json of a model
    "config_ok.json": _config(),
    "config_empty.json": "",
    "config_list.json": "[]",
    "config_latin1.json": '{"é": 1}'.encode("latin-1"),
    "config_deep.json": "[" * 100_000 + "]" * 100_000,
    "config_no_layers.json": _config(num_hidden_layers="absent"),
    "config_layers_text.json": _config(num_hidden_layers="two"),
    "config_layers_float.json": _config(num_hidden_layers=2.7),
    "config_layers_bool.json": _config(num_hidden_layers=True),
    "config_layers_inf.json": _config(num_hidden_layers=float("inf")),
    "config_layers_huge.json": _config(num_hidden_layers=1 << 40),
    "config_no_heads.json": _config(num_attention_heads="absent"),
    "config_zero_heads.json": _config(num_attention_heads=0),
    "config_no_hidden.json": _config(hidden_size="absent"),
    "config_small.json": _config(hidden_size=4),
    "config_kv3.json": _config(num_key_value_heads=3),
    "config_rank0.json": _config(kv_lora_rank=0),
    "config_no_rope.json": _config(kv_lora_rank=512),
    "config_head_text.json": _config(head_dim="x"),
    "config_head_0.json": _config(head_dim=0),
    "config_layers_1025.json": _config(num_hidden_layers=1025),
    "config_layers_text_1.json": _config(num_hidden_layers="1_0"),
    "config_head_false.json": _config(head_dim=False),
    "config_head_list.json": _config(head_dim=[]),
    "config_kv16.json": _config(num_key_value_heads=16),
    "config_hidden_65.json": _config(hidden_size=65),
    # right, but not as an output
    "s2.toml": 'mode = "write"\n',
    "key_empty.json": '{"": 1}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files above, and a folder named `folder`."""
    path = tmp_path_factory.mktemp("malformed")
    for name, content in FILES.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "folder").mkdir()
    return path


def run(*args: str) -> list[str]:
    return ["run", *args]


def put(*fields: str) -> list[str]:
    return ["run", *(word for field in fields for word in ("--set", field))]


COMMANDS: list[Case] = [
    (["rnu"], ["'rnu'", "did you mean 'run'"]),
    (["explore", "--seeds", "2", "--model", "mistral"], ["model", "'mistral'", "choose from", "deepseek-v3"]),
    (["simulate"], ["'simulate'", "choose from", "matrix", "run"]),
    ([""], ["''", "choose from", "run"]),
    (["--versoin"], ["--versoin", "no such option", "'--version'"]),
    (run("--relese", "0.26.0"), ["--relese", "no such option", "'--release'"]),
    (run("-x"), ["-x", "no such option", "did you mean"]),
    (["matrix", "--prefil", "1"], ["--prefil", "no such option", "'--prefill'"]),
    (["models", "--jsno"], ["--jsno", "'--json'"]),
    (["faults", "--mode", "read"], ["--mode", "no such option", "'--json'"]),
    (run("a.toml", "b.toml"), ["unexpected extra argument", "b.toml", "kvcover run --help"]),
    (["matrix", "scenario.toml"], ["unexpected extra argument", "scenario.toml", "kvcover matrix --help"]),
    (["models", "llama-3.1-8b"], ["unexpected extra argument", "llama-3.1-8b", "kvcover models --help"]),
    (run("--seed", "x"), ["--seed", "'x'", "integer"]),
    (run("--seed", "1.5"), ["--seed", "'1.5'", "integer"]),
    (run("--release"), ["--release", "requires an argument", "0.33.0"]),
    (run("--fault"), ["--fault", "requires an argument", "drop:KEY"]),
    (["routers", "--mode"], ["--mode", "requires an argument", "write"]),
    (run("--json=1"), ["--json", "does not take a value", "'1'"]),
    (["releases", "0.26"], ["releases", "'0.26'", "'0.26.0'"]),
    (["releases", "0.26.0", "9.9"], ["releases", "'9.9'", "choose from", "0.33.0"]),
    (["routers", "--mode", "push"], ["--mode", "'push'", "write or read"]),
]

OPTIONS: list[Case] = [
    (run("--release", "9.9"), ["release", "'9.9'", "choose from", "0.33.0"]),
    (run("--release", " 0.26.0"), ["release", "' 0.26.0'", "did you mean '0.26.0'"]),
    (run("--release", ""), ["release", "''", "choose from"]),
    (run("--decode-release", "0.32"), ["decode_release", "'0.32'", "'0.32.0'"]),
    (run("--decode-release", "0.26.1"), ["decode_release", "'0.26.1'", "'0.26.0'"]),
    (run("--router", "toyproxy"), ["router", "'toyproxy'", "'toy-proxy'"]),
    (run("--router", "vllm-router 0.1.99"), ["router", "'vllm-router 0.1.99'", "'vllm-router 0.1.1"]),
    (run("--router", "nginx"), ["router", "'nginx'", "choose from", "toy-proxy"]),
    (run("--mode", "push"), ["mode", "'push'", "read, write"]),
    (run("--mode", "WRITE"), ["mode", "'WRITE'", "write"]),
    (run("--tier", "gpu"), ["--tier", "'gpu'", "model"]),
    (run("--tier", "hardware"), ["--tier hardware", "can't run here", "kvcover doctor"]),
    (run("--vllm", "0.26.0"), ["--vllm", "'0.26.0'", "--tier connector"]),
    (run("--seed", "-1"), ["seed", "-1", ">= 0"]),
    (run("--seed", "99999999999999999999"), ["seed", "99999999999999999999", "<= 9223372036854775807"]),
    (run("--prefill", "0"), ["prefill.tp", "0", ">= 1"]),
    (run("--prefill", "257"), ["prefill.tp", "257", "<= 256"]),
    (run("--prefill", "tp=-1"), ["prefill.tp", "-1", ">= 1"]),
    (run("--prefill", "tp=99999999999999999999999"), ["prefill.tp", "99999999999999999999999", "<= 256"]),
    (run("--prefill", "dp=0"), ["prefill.dp", "0", ">= 1"]),
    (run("--decode", "dp=257"), ["decode.dp", "257", "<= 256"]),
    (run("--prefill", "tp="), ["--prefill", "'tp='", "a number such as"]),
    (run("--prefill", ""), ["--prefill", "''", "a number such as"]),
    (run("--prefill", "tp=x"), ["--prefill", "'x'", "a number such as"]),
    (run("--prefill", "tp=nan"), ["--prefill", "'nan'", "a number such as"]),
    (run("--prefill", "tp=1.5"), ["--prefill", "'1.5'", "a number such as"]),
    (run("--prefill", "tpp=4"), ["--prefill", "'tpp'", "'tp'"]),
    (run("--prefill", "pp=4"), ["--prefill", "'pp'", "tp"]),
    (run("--decode", "tp=4,tp=2"), ["--decode", "twice", "'tp=4,tp=2'", "tp=4,dp=2"]),
    (run("--prefill", "tp=1_6"), ["--prefill", "'1_6'", "a number such as"]),
    (run("--prefill", "3"), ["prefill.tp", "3", "8 KV heads", "use 2"]),
    (run("--decode", "5"), ["decode.tp", "5", "8 KV heads", "use 4"]),
    (run("--decode", "12"), ["decode.tp", "12", "8 KV heads", "use 8"]),
    (run("--decode", "8", "--model", "layers=2,kv_heads=6,head_dim=8"), ["decode.tp", "8", "6 KV heads", "use 6"]),
    (["matrix", "--mode", "push"], ["--mode", "'push'", "both, read, write"]),
    (["matrix", "--prefill", "0"], ["--prefill", "0", "1 to 256"]),
    (["matrix", "--decode", "257"], ["--decode", "257", "1 to 256"]),
    (["matrix", "--prefill", "1,1"], ["--prefill", "1", "'1,1'", "once"]),
    (["matrix", "--prefill", "1,,2"], ["--prefill", "'1,,2'", "a number such as"]),
    (["matrix", "--prefill", "1..8"], ["--prefill", "'1..8'", "a number such as"]),
    (["matrix", "--decode", "1,5"], ["decode.tp", "5", "8 KV heads", "use 4"]),
    (["matrix", "--set", "expect.outcome=ok"], ["expect", "--check"]),
    (["matrix", "--tier", "x"], ["--tier", "'x'", "model"]),
    (["matrix", "--set", "prefill=4"], ["prefill", "4", "a table"]),
    (["matrix", "--set", "decode=x"], ["decode", "'x'", "a table"]),
    (["matrix", "--set", "prefill=0"], ["prefill", "0", "a table"]),
    (["matrix", "--set", "mode=push"], ["mode", "'push'", "--mode"]),
    (["matrix", "--set", "prefill.tp=x"], ["prefill.tp", "'x'", "--prefill"]),
]

FAULTS: list[Case] = [
    (run("--fault", ""), ["faults[0]", "''", "drop", "set", "rename"]),
    (run("--fault", "drop"), ["faults[0]", "'drop'", "drop:KEY"]),
    (run("--fault", "drop:"), ["faults[0]", "'drop:'", "drop:KEY"]),
    (run("--fault", "dorp:transfer_id"), ["faults[0]", "'dorp'", "drop:KEY"]),
    (run("--fault", "DROP:transfer_id"), ["faults[0]", "'DROP'", "use drop"]),
    (run("--fault", "drop:a=b"), ["faults[0]", "'drop:a=b'", "drop:KEY"]),
    (run("--fault", "set:a"), ["faults[0]", "'set:a'", "set:KEY=JSON"]),
    (run("--fault", "set:a=hello"), ["faults[0]", "'hello'", "not JSON", '"hello"']),
    (run("--fault", "rename:a"), ["faults[0]", "'rename:a'", "rename:KEY=NEW"]),
    (run("--fault", "rename:a="), ["faults[0]", "'rename:a='", "rename:KEY=NEW"]),
    (run("--fault", "drop:transfer_id@prefil"), ["faults[0]", "'prefil'", "@prefill"]),
    (run("--fault", "drop:transfer_id@"), ["faults[0]", "drop:transfer_id@", "@prefill or @decode"]),
    (run("--fault", "drop:transfer_id#5"), ["faults[0]", "request 5", "0 to 0"]),
    (run("--decode", "dp=2", "--fault", "drop:transfer_id#2"), ["faults[0]", "request 2", "0 to 1"]),
    (run("--fault", "drop:transfer_id", "--fault", "drop:"), ["faults[1]", "'drop:'", "drop:KEY"]),
    (run("--fault", "set:remote_tp_size=NaN"), ["faults[0]", "NaN", "JSON"]),
    (run("--fault", "drop:transfer_id#-1"), ["faults[0]", "-1", "#REQUEST"]),
    (run("--fault", "drop:transfer_id#x"), ["faults[0]", "x", "#REQUEST"]),
    (run("--fault", "drop:transfer_id#"), ["faults[0]", "transfer_id#", "#REQUEST"]),
    (
        run("--fault", "drop:transfer_id@prefill@decode"),
        ["faults[0]", "@prefill@decode", "@LEG"],
    ),
    (
        run("--fault", "drop:transfer_id#0@prefill"),
        ["faults[0]", "#0@prefill", "@LEG][#REQUEST"],
    ),
    (run("--fault", f"set:remote_tp_size={_DIGITS}"), ["faults[0]", "999", "digits"]),
    (run("--fault", f"drop:transfer_id#{_DIGITS}"), ["faults[0]", "999", "#REQUEST", "#0"]),
    (run("--fault", "set:transfer_id=" + "[" * 5000 + "]" * 5000), ["faults[0]", "[[[", "nested"]),
    (run("{legg.toml}"), ["faults[0].legg", "'prefill'", "'leg'"]),
    (run("{fault_kind.toml}"), ["faults[0].kind", "'dorp'", "'drop'"]),
    (run("{fault_leg.toml}"), ["faults[0].leg", "'both'", "decode, prefill"]),
    (run("{fault_no_key.toml}"), ["faults[0]", "'kind': 'drop'", "key"]),
    (run("{fault_empty_key.toml}"), ["faults[0].key", "''", "must not be empty"]),
    (run("{fault_request.toml}"), ["faults[0]", "request 9", "0 to 0"]),
    (run("{fault_no_new.toml}"), ["faults[0]", "'rename'", "new"]),
    (run("{fault_value.toml}"), ["faults[0].value", "1", "kind 'set' only"]),
    (run("{faults_text.toml}"), ["faults", "'drop:remote_tp_size'", "a list"]),
    (run("{faults_text.toml}", "--fault", "drop:a"), ["faults", "'drop:remote_tp_size'", "a list of faults"]),
    (run("{fault_int.toml}"), ["faults[0]", "3", "text or a table", "drop:remote_tp_size"]),
    (run("{fault_minus.toml}"), ["faults[0].requests[0]", "-1", ">= 0"]),
    (run("{fault_nobody.toml}"), ["faults[0].requests", "[]", "leave it out"]),
    (run("{fault_date.toml}"), ["faults[0]", "2026", "JSON"]),
]

OVERRIDES: list[Case] = [
    (run("--override", "ports"), ["--override", "'ports'", "FIELD=POLICY"]),
    (run("--override", "=x"), ["--override", "'=x'", "FIELD=POLICY"]),
    (run("--override", "ports="), ["overrides.ports", "''", "dp_plus_tp"]),
    (run("--override", "ports=dp_plus"), ["overrides.ports", "'dp_plus'", "'dp_plus_tp'"]),
    (run("--override", "port=dp_plus_tp"), ["overrides.port", "no such policy field", "'ports'"]),
    (run("--override", "name=x"), ["overrides.name", "no such policy field", "choose from", "ports"]),
    (run("--release", "0.24.0", "--override", "write_map=fan"), ["overrides.write_map", "'fan'", "write_plan", "'head_slices'"]),
    (run("--release", "0.30.0", "--override", "read_map=gather"), ["overrides.read_map", "'gather'", "read_guard", "'none'"]),
    (
        run("--release", "0.24.0", "--override", "completion=all_writers"),
        ["overrides.completion", "'all_writers'", "write_done_to", "'targets'"],
    ),
    (run("{overrides_int.toml}"), ["overrides", "3", "a table"]),
    (run("{overrides_int.toml}", "--override", "ports=dp_plus_tp"), ["overrides", "3", "a table", "ports"]),
    (run("{override_int.toml}"), ["overrides.ports", "3", "text"]),
    (run("--override", "a.b=c"), ["overrides.a", "no such policy field", "choose from"]),
]

SETS: list[Case] = [
    (put("x"), ["--set", "'x'", "FIELD=VALUE"]),
    (put("=1"), ["--set", "'=1'", "FIELD=VALUE"]),
    (put("relase=0.26.0"), ["relase", "'0.26.0'", "'release'"]),
    (put("x=1"), ["x", "1", "choose from", "timers"]),
    (put("prefill=4"), ["prefill", "4", "a table"]),
    (put("prefill=null"), ["prefill", "None", "a table"]),
    (put("prefill.tp=x"), ["prefill.tp", "'x'", "a whole number"]),
    (put("prefill.tp=1e3"), ["prefill.tp", "1000.0", "a whole number"]),
    (put("prefill.tp=true"), ["prefill.tp", "True", "a whole number"]),
    (put("prefill.tp=null"), ["prefill.tp", "None", "a whole number"]),
    (put("prefill.foo.bar=1"), ["prefill.foo", "'bar': 1", "num_blocks"]),
    (put("prefill.=1"), ["--set prefill.", "''", "name a field"]),
    (put("mode.x=1"), ["mode", "{'x': 1}", "write or read"]),
    (put("mode=read", "mode.x=1"), ["--set mode.x", "'x'", "name a field"]),
    (put("mode=pull"), ["mode", "'pull'", "read, write"]),
    (put("mode=3"), ["mode", "3", "write or read"]),
    (put("requests.0.prompt_tokens=5"), ["requests.0.prompt_tokens", "'0'", "requests=[{}]"]),
    (put("requests=[{}]", "requests.1.prompt_tokens=5"), ["--set requests.1.prompt_tokens", "'1'", "use 0 to 0"]),
    (put("requests=0"), ["requests", "0", ">= 1"]),
    (put("requests=4097"), ["requests", "4097", "<= 4096"]),
    (put("requests=1.5"), ["requests", "1.5", "a whole number"]),
    (put("requests=[1]"), ["requests[0]", "1", "a table"]),
    (put("requests=[[]]"), ["requests[0]", "[]", "a table"]),
    (put("requests={}"), ["requests", "{}", "a list"]),
    (put('requests=[{"decode_dp":256}]'), ["requests[0].decode_dp", "256", "<= 255"]),
    (put('requests=[{"arrival_ns":-1}]'), ["requests[0].arrival_ns", "-1", ">= 0"]),
    (put('requests=[{"decode_blocks":"x"}]'), ["requests[0].decode_blocks", "'x'", "a list"]),
    (put('requests=[{"decode_blocks":[]}]'), ["requests[0].decode_blocks", "0 blocks", "16 block ids"]),
    (put("prompt_tokens=0"), ["prompt_tokens", "0", ">= 1"]),
    (put("prompt_tokens=NaN"), ["prompt_tokens", "nan", "a whole number"]),
    (put("prompt_tokens=1e400"), ["prompt_tokens", "inf", "a whole number"]),
    (put("prompt_tokens=16777217"), ["prompt_tokens", "16777217", "<= 16777216"]),
    (put("prompt_tokens=16777216"), ["num_blocks", "2097153", "use at most 65536"]),
    (put("block_size=0"), ["block_size", "0", ">= 1"]),
    (put("block_size=2048"), ["block_size", "2048", "<= 1024"]),
    (put("kv_dtype=bf61"), ["kv_dtype", "'bf61'", "'bf16'"]),
    (put("fabric=cx8"), ["fabric", "'cx8'", "'cx7'"]),
    (put("seed=9223372036854775808"), ["seed", "9223372036854775808", "<= 9223372036854775807"]),
    (put("timers=3"), ["timers", "3", "a table"]),
    (put("timers.defer_timeout=5"), ["timers.defer_timeout", "5", "'defer_timeout_s'"]),
    (put("timers.defer_timeout_s=0"), ["timers.defer_timeout_s", "0", "> 0"]),
    (put("timers.defer_timeout_s=1e7"), ["timers.defer_timeout_s", "10000000.0", "<= 1000000.0"]),
    (put("timers.defer_timeout_s=NaN"), ["timers.defer_timeout_s", "nan", "> 0"]),
    (put("timing.message_ns=-1"), ["timing.message_ns", "-1", ">= 0"]),
    (put("timing.message_ns=1.5"), ["timing.message_ns", "1.5", "a whole number"]),
    (put("prefill.host=3"), ["prefill.host", "3", "text"]),
    (put("prefill.handshake_port=0"), ["prefill.handshake_port", "0", ">= 1"]),
    (put("prefill.notify_port=65536"), ["prefill.notify_port", "65536", "<= 65535"]),
    (put("prefill.tp=2", "prefill.notify_port=65535"), ["prefill.notify_port", "65535", "2 ranks", "use at most 65534"]),
    (run("--prefill", "tp=128,dp=128"), ["prefill.notify_port", "61005", "16384 ranks", "use at most 49152"]),
    (run("--prefill", "tp=256,dp=256"), ["prefill", "65536 ranks", "tp"]),
    (put("prefill.num_blocks=0"), ["prefill.num_blocks", "0", ">= 1"]),
    (put("prefill.num_blocks=16"), ["prefill.num_blocks", "16", "use at least 17"]),
    (put("decode.num_blocks=1048576"), ["decode.num_blocks", "1048576", "use at most 65536"]),
    (put("schema=2"), ["schema", "2", "use 1"]),
    (put("expect=ok"), ["expect", "'ok'", "a table"]),
    (put("expect.outcome=3"), ["expect.outcome", "3", "ok or refused"]),
    (put("expect.coverage=NaN"), ["expect.coverage", "nan", ">= 0"]),
    (put("expect.by_rank=1"), ["expect.by_rank", "1", "a list"]),
    (put(".prefill=1"), ["--set .prefill", "''", "name a field"]),
    (put("transfer." * 3000 + "x=1"), ["transfer", "nested"]),
    (put("faults=" + "[" * 5000 + "]" * 5000), ["faults", "[[[", "nested"]),
]

SCENARIOS: list[Case] = [
    (run("{nosuch.toml}"), ["nosuch.toml", "No such file", "path of a scenario file"]),
    (run("{folder}"), ["folder", "directory", "path of a scenario file"]),
    (run("{empty.json}"), ["empty.json", "not JSON", "kvcover run --help"]),
    (run("{binary.toml}"), ["binary.toml", "not UTF-8", "path of a scenario file"]),
    (run("{zeros.toml}"), ["zeros.toml", "not TOML", "line 1", "kvcover run --help"]),
    (run("{latin1.toml}"), ["latin1.toml", "not UTF-8", "path of a scenario file"]),
    (run("{broken.toml}"), ["broken.toml", "not TOML", "line 1", "kvcover run --help"]),
    (run("{broken.json}"), ["broken.json", "not JSON", "line 1", "kvcover run --help"]),
    (run("{toml_in.json}"), ["toml_in.json", "not JSON", "kvcover run --help"]),
    (run("{json_in.toml}"), ["json_in.toml", "not TOML", "kvcover run --help"]),
    (run("{list.json}"), ["list.json", "table of fields", "kvcover run --help"]),
    (run("{number.json}"), ["number.json", "table of fields", "kvcover run --help"]),
    (run("{null.json}"), ["null.json", "table of fields", "kvcover run --help"]),
    (run("{deep.json}"), ["deep.json", "nested too deeply", "kvcover run --help"]),
    (run("{deep.toml}"), ["deep.toml", "nested too deeply", "kvcover run --help"]),
    (run("{twice.toml}"), ["twice.toml", "overwrite", "line 2", "kvcover run --help"]),
    (run("{twice.json}"), ["twice.json", "mode", "once"]),
    (run("{digits.json}"), ["digits.json", "digits"]),
    (run("{digits.toml}"), ["digits.toml", "digits"]),
    (run(""), ["''", "path of a scenario file"]),
    (run("{relase.toml}"), ["relase", "'0.26.0'", "'release'"]),
    (run("{tpp.toml}"), ["prefill.tpp", "8", "'tp'"]),
    (run("{prompt_token.toml}"), ["requests[0].prompt_token", "8", "'prompt_tokens'"]),
    (run("{expect_x.json}"), ["expect.outcom", "'ok'", "'outcome'"]),
    (run("{date.toml}"), ["release", "2026, 1, 1", "text"]),
    (run("{prefill_int.toml}"), ["prefill", "4", "a table"]),
    (run("{prefill_list.json}"), ["prefill", "[4]", "a table"]),
    (run("{prefill_text.toml}"), ["prefill", "'tp=4'", "a table"]),
    (run("{prefill_int.toml}", "--prefill", "2"), ["prefill", "4", "a table"]),
    (run("{prefill_text.toml}", "--prefill", "2"), ["prefill", "'tp=4'", "a table"]),
    (run("{tp_text.toml}"), ["prefill.tp", "'4'", "a whole number"]),
    (run("{tp_float.toml}"), ["decode.tp", "4.0", "a whole number"]),
    (run("{tp_bool.json}"), ["decode.tp", "True", "a whole number"]),
    (run("{nan.toml}"), ["timers.defer_timeout_s", "nan", "> 0"]),
    (run("{inf.json}"), ["timers.transfer_timeout_s", "inf", "<= 1000000.0"]),
    (run("{blocks_twice.toml}"), ["requests[0].prefill_blocks", "[1, 1]", "once"]),
    (run("{blocks_few.toml}"), ["requests[0].decode_blocks", "1 block", "give 2 block ids"]),
    (run("{blocks_minus.toml}"), ["requests[0].prefill_blocks[0]", "-1", ">= 1"]),
    (run("{blocks_huge.toml}"), ["requests[0].prefill_blocks[1]", "2000000", "<= 1048576"]),
    (run("{blocks_high.toml}"), ["prefill.num_blocks", "10", "block 20", "use at least 21"]),
    (run("{blocks_zero.toml}"), ["requests[0].prefill_blocks", "0", ">= 1"]),
    (run("{dp_rank.toml}"), ["requests[0].prefill_dp", "1", "raise prefill.dp"]),
    (run("{dp_rank_2.toml}"), ["requests[0].decode_dp", "2", "use 0 to 1"]),
    (run("{no_requests.toml}"), ["requests", "[]", "a number such as 1"]),
    (run("{requests_bool.toml}"), ["requests", "True", "a whole number"]),
    (run("{schema.toml}"), ["schema", "2", "use 1"]),
    (run("{outcome.toml}"), ["expect.outcome", "'good'", "ok"]),
    (run("{coverage.toml}"), ["expect.coverage", "1.5", "<= 1.0"]),
    (run("{by_rank.toml}"), ["expect.by_rank[1]", "-0.5", ">= 0.0"]),
    (run("{surrogate.json}"), ["prefill.host", "ud800", "text"]),
]

MODELS: list[Case] = [
    (run("--model", "llama-3.1-8B-x"), ["model", "'llama-3.1-8B-x'", "'llama-3.1-8b'"]),
    (run("--model", "gpt-5"), ["model", "'gpt-5'", "choose from", "llama-3.1-8b"]),
    (run("--model", "layers=2"), ["model", "'layers=2'", "layers=2,kv_heads=8,head_dim=8"]),
    (run("--model", "layers=2,heads=8"), ["model", "'heads'", "'kv_heads'"]),
    (run("--model", "layers=2,layers=2,mla=8"), ["model", "'layers=2'", "layers=2,mla=64+16"]),
    (run("--model", "layers=0,mla=8"), ["model.layers", "'0'", "1 to 1024"]),
    (run("--model", "layers=two,mla=8"), ["model.layers", "'two'", "a number such as"]),
    (run("--model", "layers=2,kv_heads=-8,head_dim=8"), ["model.kv_heads", "'-8'", "1 to 1024"]),
    (
        run("--model", "layers=2,kv_heads=8,head_dim=99999999999999999999"),
        ["model.head_dim", "'99999999999999999999'", "1 to 65536"],
    ),
    (run("--model", "layers=2,mla=64+"), ["model.mla", "''", "a number such as"]),
    (run("--model", ""), ["model", "''", "choose from"]),
    (run("--model", "m" * 300), ["model", "mmm", "choose from"]),
    (run("--model", "{nosuch.json}"), ["nosuch.json", "No such file", "path of a config.json"]),
    (run("--model", "{folder}"), ["config.json", "No such file", "path of a config.json"]),
    (run("--model", "{config_empty.json}"), ["config_empty.json", "not JSON", "config.json"]),
    (run("--model", "{config_list.json}"), ["config_list.json", "num_hidden_layers", "Hugging Face config.json"]),
    (run("--model", "{config_latin1.json}"), ["config_latin1.json", "not UTF-8", "path of a config.json"]),
    (run("--model", "{config_no_layers.json}"), ["config_no_layers.json", "num_hidden_layers", "Hugging Face config.json"]),
    (run("--model", "{config_layers_text.json}"), ["config_layers_text.json num_hidden_layers", "'two'", "a number such as"]),
    (run("--model", "{config_layers_bool.json}"), ["config_layers_bool.json num_hidden_layers", "True", "a number such as"]),
    (run("--model", "{config_layers_huge.json}"), ["config_layers_huge.json num_hidden_layers", "1099511627776", "use 1 to"]),
    (run("--model", "{config_no_heads.json}"), ["config_no_heads.json num_attention_heads", "None", "a number such as"]),
    (run("--model", "{config_zero_heads.json}"), ["config_zero_heads.json num_attention_heads", "0", "use 1 to"]),
    (run("--model", "{config_no_hidden.json}"), ["config_no_hidden.json hidden_size", "None", "a number such as"]),
    (run("--model", "{config_small.json}"), ["config_small.json hidden_size", "4", "8 attention heads", "head_dim"]),
    (run("--model", "{config_kv3.json}", "--prefill", "2"), ["prefill.tp", "2", "3 KV heads", "use 1"]),
    (run("--model", "{config_rank0.json}"), ["config_rank0.json kv_lora_rank", "0", "use 1 to"]),
    (run("--model", "{config_no_rope.json}"), ["config_no_rope.json qk_rope_head_dim", "None", "a number such as"]),
    (run("--model", "{config_head_text.json}"), ["config_head_text.json head_dim", "'x'", "a number such as"]),
    (run("--model", "{config_layers_float.json}"), ["num_hidden_layers", "2.7", "a number such as"]),
    (run("--model", "{config_head_0.json}"), ["head_dim", "0", "use 1 to"]),
    (run("--model", "{config_layers_inf.json}"), ["num_hidden_layers", "inf", "a number such as"]),
    (run("--model", "{config_deep.json}"), ["config_deep.json", "nested", "config.json"]),
]

OUTPUTS: list[Case] = [
    (run("-o", "{folder}"), ["-o", "folder", "name a file"]),
    (run("-o", "{nosuch}/out.json"), ["-o", "out.json", "folder that exists"]),
    (run("-o", "{config_ok.json}/out.json"), ["-o", "config_ok.json/out.json", "folder that exists"]),
    (run("-o", ""), ["-o", "''", "name a file"]),
    (["matrix", "-o", "{folder}"], ["-o", "folder", "name a file"]),
    (["matrix", "--output", "{nosuch}/out.json"], ["-o", "out.json", "folder that exists"]),
    (run("-o", "o" * 300), ["-o", "ooo", "name a file"]),
]


def shorthand(text: str) -> list[str]:
    return ["run", "--fault", text]


def table(**fields: Any) -> list[str]:
    return ["run", "--set", "faults=" + json.dumps([fields])]


_NOTICE = {"kind": "delay-notice", "target": "write_done"}
_AT_0 = "faults[0]"

# Event faults as shorthands.
EVENTS: list[Case] = [
    (shorthand("drop-notise:write_done"), [_AT_0, "'drop-notise'", "did you mean 'drop-notice'", "drop-notice:MESSAGE"]),
    (shorthand("Drop-Notice:write_done"), [_AT_0, "'Drop-Notice'", "did you mean 'drop-notice'"]),
    (shorthand("drop-notice"), [_AT_0, "'drop-notice' aims at nothing", "drop-notice:MESSAGE"]),
    (shorthand("drop-notice:"), [_AT_0, "'drop-notice:' aims at nothing", "drop-notice:MESSAGE"]),
    (shorthand("drop-notice:writ"), [_AT_0, "'writ'", "did you mean 'write_done'"]),
    (shorthand("drop-notice:blob"), [_AT_0, "'blob'", "remote_blocks"]),
    (shorthand("fail-transfer:push"), [_AT_0, "'push'", "choose from write, read"]),
    (shorthand("delay-step:both,ms=3"), [_AT_0, "'both'", "choose from prefill, decode"]),
    (shorthand("fail-leg:prefil"), [_AT_0, "'prefil'", "did you mean 'prefill'"]),
    (shorthand("crash-rank:D9,ms=1"), [_AT_0, "'D9'", "choose from D0, P0"]),
    (["run", "--decode", "32", "--fault", "crash-rank:X,ms=1"], [_AT_0, "'X'", "use P0 to P0 or D0 to D31"]),
    (shorthand("drop-notice:write_done,to=D7"), [_AT_0, "'D7'", "choose from D0, P0"]),
    (shorthand("drop-notice:write_done,from="), [_AT_0, "''", "choose from D0, P0"]),
    (shorthand("drop-notice:write_done,request=3"), [_AT_0, "request 3", "0 to 0"]),
    (shorthand("abort:5,at=waiting"), [_AT_0, "request 5", "0 to 0"]),
    (shorthand("abort:0"), [_AT_0, "'abort:0'", "at=before|waiting|after"]),
    (shorthand("abort:x"), [_AT_0, "'x'", "abort:REQUEST"]),
    (shorthand("abort:-1"), [_AT_0, "'-1'", "abort:REQUEST"]),
    (shorthand("abort:٤"), [_AT_0, "'٤'", "abort:REQUEST"]),
    (shorthand("abort:" + _DIGITS), [_AT_0, "999", "abort:REQUEST"]),
    (shorthand("abort:0,at=later"), [_AT_0, "at='later'", "did you mean 'after'"]),
    (shorthand("preempt:0,ms=1"), [_AT_0, "'ms'", "preempt:REQUEST"]),
    (shorthand("drop-notice:write_done,too=D0"), [_AT_0, "'too'", "did you mean 'to'"]),
    (shorthand("drop-notice:write_done,x=1"), [_AT_0, "'x'", "it takes from, to, n"]),
    (shorthand("drop-notice:write_done,"), [_AT_0, "''", "it takes from, to, n"]),
    (shorthand("drop-notice:write_done,n"), [_AT_0, "'n'", "with a value"]),
    (shorthand("drop-notice:write_done,n=1,n=2"), [_AT_0, "'n=2'", "give n once"]),
    (shorthand("drop-notice:write_done,n=x"), [_AT_0, "'x'", "n=1"]),
    (shorthand("drop-notice:write_done,n=1.5"), [_AT_0, "'1.5'", "n=1"]),
    (shorthand("drop-notice:write_done,n=1_0"), [_AT_0, "'1_0'", "n=1"]),
    (shorthand("drop-notice:write_done,n=" + _DIGITS), [_AT_0, "999", "n=1"]),
    (shorthand("drop-notice:write_done,n=-1"), [_AT_0, "n=-1", "0 to 1000000"]),
    (shorthand("drop-notice:write_done,pattern=xyz"), [_AT_0, "pattern='xyz'", "fpf"]),
    (shorthand("delay-notice:write_done"), [_AT_0, "needs 'ms'", "delay-notice:MESSAGE,ms=N"]),
    (shorthand("delay-notice:write_done,ms=nan"), [_AT_0, "'nan'", "ms=1.5"]),
    (shorthand("delay-notice:write_done,ms=inf"), [_AT_0, "'inf'", "ms=1.5"]),
    (shorthand("delay-notice:write_done,ms=1e999"), [_AT_0, "ms=inf", "0 to 1000000000"]),
    (shorthand("delay-notice:write_done,ms=-3"), [_AT_0, "ms=-3", "0 to 1000000000"]),
    (shorthand("misroute-notice:write_done,port=99999"), [_AT_0, "port=99999", "-65535 to 65535"]),
    (shorthand("fail-transfer:write,status=ERR_RDMA"), [_AT_0, "status='ERR_RDMA'", "ERR_RDMA_OP"]),
    (shorthand("fail-transfer:write,layer=-1"), [_AT_0, "layer=-1", "0 to 1023"]),
    (shorthand("partial-transfer:write,fraction=1"), [_AT_0, "fraction=1", "between 0 and 1"]),
    (shorthand("sq-full:write,times=0"), [_AT_0, "times=0", "1 to 1000000"]),
    (shorthand("slow-nic:D0,factor=0.5"), [_AT_0, "factor=0.5", "1 to 1000000"]),
    (shorthand("wrong-dp:prefill,dp=-1"), [_AT_0, "dp=-1", "0 to 255"]),
]

# Faults as tables.
TABLES: list[Case] = [
    (table(), [_AT_0, "{}", "no kind", 'kind = "drop"']),
    (table(target="write_done"), [_AT_0, "'target': 'write_done'", "no kind"]),
    (table(kind=3, target="x"), ["faults[0].kind", "3", "drop-notice"]),
    (table(kind="DROP", key="a"), ["faults[0].kind", "'DROP'", "did you mean 'drop'"]),
    (table(kind="drop-notise", target="write_done"), ["faults[0].kind", "'drop-notise'", "did you mean 'drop-notice'"]),
    (table(kind="drop-notice"), [_AT_0, "'kind': 'drop-notice'", "'target'"]),
    (table(kind="drop-notice", target="write_don"), ["faults[0].target", "'write_don'", "did you mean 'write_done'"]),
    (table(kind="drop-notice", target=3), ["faults[0].target", "3", "text"]),
    (table(kind="abort", target=0), ["faults[0].target", "0", "text"]),
    (table(kind="drop-notice", target="write_done", ms2=3), ["faults[0].ms2", "3", "choose from"]),
    (table(kind="drop-notice", target="write_done", reqest=0), ["faults[0].reqest", "0", "did you mean 'request'"]),
    (table(kind="drop-notice", target="write_done", ms=3), ["faults[0].ms", "3", "request"]),
    (table(kind="drop-notice", target="write_done", n=1.5), ["faults[0].n", "1.5", "a whole number"]),
    (table(kind="drop-notice", target="write_done", to=0), ["faults[0].to", "0", "text"]),
    (table(kind="drop-notice", target="write_done", **{"from": "D5"}), [_AT_0, "'D5'", "choose from D0, P0"]),
    (table(**_NOTICE), [_AT_0, "needs 'ms'", "delay-notice:MESSAGE,ms=N"]),
    (table(**_NOTICE, ms="3"), ["faults[0].ms", "'3'", "a number"]),
    (table(**_NOTICE, ms=-3), ["faults[0].ms", "-3", "0 to 1000000000"]),
    (table(**_NOTICE, ms=float("nan")), ["faults[0].ms", "nan", "0 to 1000000000"]),
    (table(**_NOTICE, ms=10**400), ["--set faults", "401 digits", "a plain value"]),
    (table(kind="fail-transfer", target="write", status="X"), ["faults[0].status", "'X'", "ERR_RDMA_OP"]),
    (table(kind="drop", key="a", to="D0"), ["faults[0].to", "'D0'", "key"]),
    (table(kind="drop", key="a@b"), ["faults[0].key", "'a@b'", "@, # or ="]),
    (table(kind="drop", key=3), ["faults[0].key", "3", "text"]),
    (table(kind="drop", key="a", new="b"), ["faults[0].new", "'b'", "'rename' only"]),
    (table(kind="rename", key="a", new="a"), ["faults[0].new", "'a'", "another name"]),
    (table(kind="drop", key="a", requests=[0, 0]), ["faults[0].requests", "[0, 0]", "each once"]),
    (table(kind="set", key="a", value="\ud800"), ["faults[0].value", "ud800", "text"]),
    (table(kind="set", key="a", value=float("inf")), ["faults[0].value", "Infinity", "finite"]),
    (put("faults=[[]]"), [_AT_0, "[]", "text or a table"]),
    (put('faults=["drop:a", {"kind": "dorp"}]'), ["faults[1].kind", "'dorp'", "'drop'"]),
]

_FABRIC = {"write_fixed_ns": 1, "write_gb_per_s": 1, "read_fixed_ns": 1, "read_gb_per_s": 1}

# Fields that came later, sizes, and numbers that only Python takes for such.
FIELDS: list[Case] = [
    (put("prefill.pods=0"), ["prefill.pods", "0", ">= 1"]),
    (put("prefill.pods=x"), ["prefill.pods", "'x'", "a whole number"]),
    (put("decode.pods=2"), ["decode.pods", "2 pods", "1 DP ranks", "divisor of 1"]),
    (put("prefill.max_tokens_per_step=0"), ["prefill.max_tokens_per_step", "0", ">= 1"]),
    (put("prefill.max_tokens_per_step=1.5"), ["prefill.max_tokens_per_step", "1.5", "a whole number"]),
    (put("decode.lookahead_tokens=-1"), ["decode.lookahead_tokens", "-1", ">= 0"]),
    (put("decode.lookahead_tokens=65537"), ["decode.lookahead_tokens", "65537", "<= 65536"]),
    (put("decode.cuda_graphs=ful"), ["decode.cuda_graphs", "'ful'", "did you mean 'full'"]),
    (put("decode.cuda_graphs=true"), ["decode.cuda_graphs", "True", "none or piecewise or full"]),
    (put("decode.load_failure=retry"), ["decode.load_failure", "'retry'", "fail, recompute"]),
    (put("decode.collectives=1"), ["decode.collectives", "1", "true or false"]),
    (put("decode.executor_timeout_s=0"), ["decode.executor_timeout_s", "0", "> 0"]),
    (put('requests=[{"plain": 1}]'), ["requests[0].plain", "1", "true or false"]),
    (put('requests=[{"plane": true}]'), ["requests[0].plane", "True", "did you mean 'plain'"]),
    (put('requests=[{"decode_hit_blocks": 17}]'), ["requests[0].decode_hit_blocks", "17", "at most 16"]),
    (put('requests=[{"decode_hit_blocks": -1}]'), ["requests[0].decode_hit_blocks", "-1", ">= 0"]),
    (put('requests=[{"external_zero": "no"}]'), ["requests[0].external_zero", "'no'", "true or false"]),
    (put("workload=3"), ["workload", "3", "a table", "{concurrency = 4}"]),
    (put("workload.rate=1"), ["workload.rate", "1", "did you mean 'rate_per_s'"]),
    (put("workload.rate_per_s=0"), ["workload.rate_per_s", "0", ">= 0.001"]),
    (put("workload.rate_per_s=NaN"), ["workload.rate_per_s", "nan", ">= 0.001"]),
    (put("workload.concurrency=5000"), ["workload.concurrency", "5000", "<= 4096"]),
    (put("rdma=deep"), ["rdma", "'deep'", "a table", "{queue_pairs = 1}"]),
    (put("rdma.qp=1"), ["rdma.qp", "1", "queue_pairs"]),
    (put("rdma.queue_pairs=65"), ["rdma.queue_pairs", "65", "<= 64"]),
    (put("rdma.sq_depth=0"), ["rdma.sq_depth", "0", ">= 1"]),
    (put("rdma.sq_wait_s=-1"), ["rdma.sq_wait_s", "-1", "> 0"]),
    (put("fabric=3"), ["fabric", "3", "text or a table", '"cx7"']),
    (put("fabric={}"), ["fabric", "{}", "'write_fixed_ns'"]),
    (put("fabric.write_gb=1"), ["fabric.write_gb", "1", "did you mean 'write_gb_per_s'"]),
    (put("fabric=" + json.dumps({**_FABRIC, "write_fixed_ns": -1})), ["fabric.write_fixed_ns", "-1", ">= 0"]),
    (put("fabric=" + json.dumps({**_FABRIC, "read_gb_per_s": 0})), ["fabric.read_gb_per_s", "0", ">= 1e-06"]),
    (put("fabric=" + json.dumps({**_FABRIC, "read_gb_per_s": float("nan")})), ["fabric.read_gb_per_s", "nan", ">= 1e-06"]),
    (put("prefill.host="), ["prefill.host", "''", "without spaces", "10.0.0.1"]),
    (put('prefill.host="a\\nb"'), ["prefill.host", "'a\\nb'", "without spaces"]),
    (put("prefill.handshake_port=61005"), ["prefill.notify_port", "61005", "overlaps", "at least 1 apart"]),
    (put("prefill.tp=8", "prefill.notify_port=6305"), ["prefill.notify_port", "6305", "8 from 6301 on", "at least 8 apart"]),
    (put("expect.by_rank=[1, 1]"), ["expect.by_rank", "2 numbers", "give 1"]),
    (put("prefill..tp=1"), ["--set prefill..tp", "''", "name a field"]),
    (put("a\tb=1"), ["'a\\tb'", "1", "choose from"]),
    (put("k" * 300 + "=1"), ["kkk...", "1", "choose from"]),
    (put("prefill=[]"), ["prefill", "[]", "a table", "{tp = 4}"]),
    (put("prefill=false"), ["prefill", "False", "a table", "{tp = 4}"]),
    (put("decode="), ["decode", "''", "a table", "{tp = 4}"]),
    (put('mode={"a": 1, "a": 2}'), ["--set mode", "'a'", "more than once"]),
    (put("model=\udcff"), ["model", "udcff", "UTF-8"]),
    (run("\udcff.toml"), ["udcff.toml", "No such file", "path of a scenario file"]),
    (run("--prefill", "tp=٤"), ["--prefill", "'٤'", "a number such as"]),
    (run("--seed", "1_0"), ["--seed", "'1_0'", "integer"]),
    (run("--seed", _DIGITS), ["--seed", "999", "integer"]),
    (run("--model", "layers=1_0,mla=8"), ["model.layers", "'1_0'", "a number such as"]),
    (run("--model", "layers=2,mla=65536+65536"), ["model.mla", "65536+65536", "1 to 65536"]),
    (run("--model", "{config_layers_1025.json}"), ["num_hidden_layers", "1025", "1 to 1024"]),
    (run("--model", "{config_layers_text_1.json}"), ["num_hidden_layers", "'1_0'", "a number such as"]),
    (run("--model", "{config_head_false.json}"), ["head_dim", "False", "a number such as"]),
    (run("--model", "{config_head_list.json}"), ["head_dim", "[]", "a number such as"]),
    (run("--model", "{config_kv16.json}"), ["num_key_value_heads", "16", "1 to 8"]),
    (run("--model", "{config_hidden_65.json}"), ["hidden_size", "65", "8 attention heads", "head_dim"]),
    (run("{key_empty.json}"), ["''", "1", "choose from"]),
    (run("{s2.toml}", "-o", "{s2.toml}"), ["-o", "s2.toml", "overwritten", "another file"]),
    (run("--model", "{config_ok.json}", "-o", "{config_ok.json}"), ["-o", "config_ok.json", "overwritten", "another file"]),
    (run("-o", "/dev/null"), ["-o", "'/dev/null'", "regular file", "name a file"]),
    (["matrix", "--set", "decode.tp=2"], ["decode.tp", "2", "--decode"]),
    (run("--fault", "set:a=1x"), [_AT_0, "'1x'", "not JSON", '"1x"']),
    (run("--fault", "set:a=Infinity"), ["faults[0]", "Infinity", "finite"]),
    (run("--fault", "rename:a=a"), [_AT_0, "'a'", "another name"]),
    (run("--fault", "drop:a#0#0"), [_AT_0, "[0, 0]", "each once"]),
    (run("--model", "layers=1024,mla=64", "--prefill", "256", "--decode", "256", "--set", "requests=64"),
     ["scenario", "33554688 events", "20000000", "lower requests"]),
    (put("prompt_tokens=400000", "requests=[{}]", "prefill.max_tokens_per_step=1"), ["scenario", "events", "max_tokens_per_step"]),
    (run("--set", "requests=4096", "--set", "workload.concurrency=1", "--prefill", "256", "--decode", "256"),
     ["scenario", "67109120 events", "lower requests"]),
    (run("--set", "requests=1024", "--set", "prompt_tokens=8192", "--prefill", "dp=256", "--decode", "tp=128,dp=16"),
     ["scenario", "cells", "lower requests"]),
]  # fmt: skip

CASES = [*COMMANDS, *OPTIONS, *FAULTS, *OVERRIDES, *SETS, *SCENARIOS, *MODELS, *OUTPUTS, *EVENTS, *TABLES, *FIELDS]


def _fill(args: list[str], folder: Path) -> list[str]:
    """`{NAME}` as the path of that file; other braces, as in JSON, stay."""
    filled = []
    for arg in args:
        name, closed, rest = arg[1:].partition("}")
        is_name = arg.startswith("{") and closed and all(c.isalnum() or c in "._" for c in name)
        filled.append(f"{folder / name}{rest}" if is_name else arg)
    return filled


def _short_id(case: Case) -> str:
    args, _fragments = case
    text = " ".join(args)
    return (text if len(text) <= 60 else text[:57] + "...").encode("ascii", "replace").decode()


def _check(code: object, out: str, err: str, fragments: list[str]) -> None:
    assert code == 2, f"exit code {code}: {err}"
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("kvcover: ")
    assert "Traceback" not in err
    assert "\x1b" not in err
    for fragment in fragments:
        assert fragment in lines[0], f"{fragment!r} is not in {lines[0][:400]!r}"


@pytest.mark.parametrize("case", CASES, ids=map(_short_id, CASES))
def test_bad_input_is_one_helpful_line(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, fragments = case
    before = sorted(folder.iterdir())
    monkeypatch.chdir(tmp_path)
    words = _fill(args, folder)
    if words[0] in ("run", "matrix") and not {"-o", "--output"} & set(words):
        words = [words[0], "-o", "out.json", *words[1:]]
    monkeypatch.setattr(sys, "argv", ["kvcover", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    _check(stop.value.code, captured.out, captured.err, fragments)
    assert list(tmp_path.iterdir()) == []
    assert sorted(folder.iterdir()) == before


SUBPROCESSES: list[Case] = [
    (["rnu"], ["'rnu'", "did you mean 'run'"]),
    (run("--relese", "0.26.0"), ["--relese", "'--release'"]),
    (run("{nosuch.toml}"), ["nosuch.toml", "No such file", "path of a scenario file"]),
    (["matrix", "--decode", "1,5"], ["decode.tp", "5", "use 4"]),
    (run("--fault", "dorp:transfer_id"), ["faults[0]", "'dorp'", "drop:KEY"]),
]


COMMAND = [sys.executable, "-m", "kvcover"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.mark.parametrize("case", SUBPROCESSES, ids=map(_short_id, SUBPROCESSES))
def test_bad_input_in_a_process_of_its_own(case: Case, folder: Path, tmp_path: Path) -> None:
    args, fragments = case
    done = subprocess.run(
        [*COMMAND, *_fill(args, folder)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        timeout=60,
        check=False,
    )
    _check(done.returncode, done.stdout, done.stderr, fragments)
    assert list(tmp_path.iterdir()) == []


# -- outputs that are there already, and a standard output that is not ---------------------------------------------


def _kvcover(monkeypatch: pytest.MonkeyPatch, *args: str) -> object:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["kvcover", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def test_a_pipe_stays_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = _kvcover(monkeypatch, "run", "-o", str(tmp_path / "pipe"))
    captured = capsys.readouterr()
    _check(code, captured.out, captured.err, ["-o", "pipe", "regular file", "name a file"])
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "link.json").symlink_to("there.json")
    assert _kvcover(monkeypatch, "run", "-o", str(tmp_path / "link.json")) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())["outcome"] == "ok"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_input_behind_a_link_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.toml").write_text('mode = "read"')
    (tmp_path / "link").symlink_to("s.toml")
    code = _kvcover(monkeypatch, "run", str(tmp_path / "s.toml"), "-o", str(tmp_path / "link"))
    captured = capsys.readouterr()
    _check(code, captured.out, captured.err, ["-o", "link", "overwritten", "another file"])
    assert (tmp_path / "s.toml").read_text() == 'mode = "read"'


def test_a_byte_order_mark_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.toml").write_bytes(b'\xef\xbb\xbfmode = "read"\n')
    assert _kvcover(monkeypatch, "run", str(tmp_path / "s.toml")) == 0


def test_names_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """rich would take one for markup and the other for the picture of a cat."""
    assert _kvcover(monkeypatch, *put("prefill.host=[/x]a", "decode.host=fd00::cat:1")) == 0
    out = capsys.readouterr().out
    assert "prefill.host=[/x]a" in out
    assert "decode.host=fd00::cat:1" in out


@pytest.mark.parametrize("many", [("requests=512", "prefill.dp=16", "decode.dp=16"), ("requests=4096", "prompt_tokens=16")])
def test_large_workloads_are_let_through(many: tuple[str, ...]) -> None:
    data: dict[str, Any] = {"model": "deepseek-v3"}
    for field in many:
        name, _, value = field.partition("=")
        set_field(data, name, int(value))
    assert len(resolve(build(data)).requests) == data["requests"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("args", [["run"], ["run", "--json"], ["models"]], ids=" ".join)
def test_a_full_disk_is_one_line(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *args], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60, check=False
        )
    _check(done.returncode, "", done.stderr, ["standard output", "No space left", "-o FILE"])


@pytest.mark.parametrize("args", [["run"], ["run", "--json"], ["matrix"], ["--help"], ["run", "--help"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [*COMMAND, *args], stdout=closed, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "args", [["run", "--release", "0.26.0", "--prefill", "8", "--decode", "8"], ["matrix"], ["faults"]], ids=len
)
def test_characters_that_the_terminal_lacks(args: list[str]) -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, *args], capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcover.sim.tiers.load_tier", interrupt)
    assert _kvcover(monkeypatch, "run") == 130
    assert capsys.readouterr() == ("", "kvcover: interrupted\n")
