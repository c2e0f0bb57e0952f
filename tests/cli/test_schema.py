"""`kvcover schema`: JSON Schemas hold for what every command writes, refuse what kvcover refuses, and name units."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from kvcover import InputError, Scenario, build, load, run
from kvcover.sim.results.read import read_objects, result_of, sides_of
from kvcover.sim.results.schemas import KINDS, schema_of

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "layers=2,mla=64+16")
CHECKERS = {kind: jsonschema.Draft202012Validator(schema_of(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_schema(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_prints_it(kind: str, kvcover: Any) -> None:
    code, out, _ = kvcover("schema", kind)
    assert code == 0 and json.loads(out) == json.loads(json.dumps(schema_of(kind)))


def test_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'result'"):
        schema_of("resutl")


COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "--release", "0.26.0", "--prefill", "2", "--decode", "tp=2,dp=2", "--set", "requests=3", *SMALL),
    "run --causes": ("run", "--release", "0.26.0", "--prefill", "2", "--decode", "2", "--causes", *SMALL),
    "run with faults": (
        "run",
        "--fault",
        "drop:remote_tp_size@prefill",
        "--fault",
        "late-rank:D0,ms=3",
        "--override",
        "ports=dp_plus_tp",
        *SMALL,
    ),
    "run that crashes": ("run", "--fault", "drop:transfer_id@prefill", "--release", "0.27.0", *SMALL),
    "matrix": ("matrix", "--release", "0.27.0", "--prefill", "1,2", "--decode", "2,4", *SMALL),
    "corpus": ("corpus", "--release", "0.26.0"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_what_commands_write_holds(name: str, ending: str, kvcover: Any, tmp_path: Path) -> None:
    path = tmp_path / f"out.{ending}"
    assert kvcover(*COMMANDS[name], "-o", str(path))[0] == 0
    text, rows = path.read_text(), read_objects(path)
    if ending == "jsonl":
        assert [json.loads(line) for line in text.splitlines()] == rows
    else:
        assert json.loads(text) == (rows[0] if name.startswith("run") else rows)  # a run is one result, not a list of them
    for row in rows:
        CHECKERS["result"].validate(row)
        CHECKERS["scenario"].validate(row["scenario"])


def test_both_results_of_a_confirmation_hold(kvcover: Any) -> None:
    words = ("--before", "0.26.0", "--after", "0.27.0", "--prefill", "2", "--decode", "2")
    _, out, _ = kvcover("confirm", *words, *SMALL, "--json")
    for side in sides_of(json.loads(out), "confirm"):
        CHECKERS["result"].validate(side)


def test_scenarios_that_explore_draws_hold(kvcover: Any, tmp_path: Path) -> None:
    kvcover("explore", "--seeds", "150", "--full", "--jobs", "1", "-o", str(tmp_path / "found.json"))
    groups = json.loads((tmp_path / "found.json").read_text())["groups"]
    assert len(groups) > 10
    for group in groups:
        CHECKERS["scenario"].validate(group["scenario"])


def test_a_file_of_router_cells_is_an_array_or_lines(kvcover: Any, tmp_path: Path) -> None:
    words = ("compat", "--router", "wide-ep", "--release", "0.27.0", "--prefill", "2", "--decode", "2")
    for name in ("found.json", "found.jsonl"):
        assert kvcover(*words, "-o", str(tmp_path / name))[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "found.json").read_text()) == rows and len(rows) == 2


def test_results_of_real_runs_hold() -> None:
    """What the real connector's runs on a GPU left, as they were kept."""
    files = sorted((ROOT / "docs" / "evidence").rglob("*.jsonl"))
    rows = [row for file in files for row in read_objects(file)]
    assert len(rows) > 30 and {row["tier"] for row in rows} == {"connector"}
    for row in rows:
        CHECKERS["result"].validate(row)


def test_scenario_files_of_the_docs_hold() -> None:
    for path in sorted((ROOT / "docs" / "findings").glob("*.toml")):
        CHECKERS["scenario"].validate(load(path))


@pytest.mark.parametrize(
    "data",
    [
        {"relaese": "0.27.0"}, {"mode": "wirte"}, {"prefill": {"tp": 0}}, {"prefill": {"tp": 257}}, {"prefill": {"size": 2}},
        {"decode": {"layout": "spilt"}}, {"timers": {"defer_timeout_s": 0}}, {"requests": 0}, {"requests": [{"prompt_tokens": 0}]},
        {"seed": -1}, {"schema": 2}, {"expect": {"coverage": 1.5}}, {"expect": {"outcome": "fine"}}, {"faults": "drop:x"},
        {"fabric": {"write_fixed_ns": 1}}, {"overrides": {"ports": 2}}, {"prompt_tokens": 1.5}, {"release": 26},
    ],
)  # fmt: skip
def test_a_scenario_that_is_refused_breaks_the_schema(data: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        build(data)
    with pytest.raises(jsonschema.ValidationError):
        CHECKERS["scenario"].validate(data)


@pytest.mark.parametrize(
    "edit",
    [
        {"schema": 2}, {"outcome": "fine"}, {"coverage": 1.5}, {"wrong": -0.1}, {"by_request": ["fine"]}, {"sets": None},
        {"by_rank": [{"dp": 0}]}, {"stray": 0.5}, {"checks": [{"name": "x", "verdict": "maybe", "reason": ""}]}, {"replay": 3},
    ],
)  # fmt: skip
def test_a_result_that_is_refused_breaks_the_schema(edit: dict[str, Any]) -> None:
    row = run(Scenario(model="layers=1,mla=8")).to_dict() | edit
    with pytest.raises(InputError):
        result_of(row, "edited")
    with pytest.raises(jsonschema.ValidationError):
        CHECKERS["result"].validate(row)


def numbers(definition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a field's schema that are of numbers, with what stands beside them."""
    if definition.get("type") in ("integer", "number"):
        yield definition
    beside = {"unit": definition["unit"]} if "unit" in definition else {}
    for inner in (*definition.get("anyOf", ()), *([definition["items"]] if isinstance(definition.get("items"), dict) else ())):
        yield from numbers(beside | inner)


_ENDS = {
    "_ns": "ns",
    "_ms": "ms",
    "_s": "s",
    "_per_s": None,
    "_tokens": "tokens",
    "_blocks": "blocks",
    "coverage": "share of cells",
}
_COUNTS = {"schema", "seed", "tp", "dp", "pp", "pods", "fired", "tried", "pairs", "layers", "of_layers", "requests", "concurrency", "queue_pairs",
           "handshake_port", "notify_port", "prefill_dp", "decode_dp", "instances", "prefill_instance", "decode_instance", "prefill_blocks", "decode_blocks"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_a_unit_and_the_one_that_its_name_says(kind: str) -> None:
    for struct in schema_of(kind)["$defs"].values():
        for name, definition in struct["properties"].items():
            for number in numbers(definition):
                if name in _COUNTS:  # ids, sizes and counts of what the name says
                    assert "unit" not in number, name
                    continue
                assert "unit" in number, (struct["title"], name)
                ends = [unit for end, unit in _ENDS.items() if name.endswith(end)]
                assert not ends or number["unit"] in ends or None in ends, (name, number["unit"])


def test_nothing_of_a_schema_is_written_by_hand() -> None:
    """Fields are those of the structs: a new one is in the schema at once."""
    for kind, struct in KINDS.items():
        fields = {field.encode_name for field in msgspec.structs.fields(struct)}
        assert set(schema_of(kind)["$defs"][struct.__name__]["properties"]) == fields
