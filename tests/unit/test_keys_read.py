"""A leg that notes who reads it: what it notes, that it is a dictionary in all else, and what findings make of the notes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest

from kvcover import build, record_of, resolve, run_world
from kvcover.real_backend.inside.keys import Notes, WatchedLeg, follow_copies
from kvcover.sim.kernel.history import History
from kvcover.sim.results.judge import judge
from kvcover.sim.results.keys import all_in_words, tell_keys
from kvcover.sim.results.record import KeyRead, LegReads, Record

CONNECTOR = "/somewhere/vllm/distributed/kv_transfer/kv_connector/v1/moriio/moriio_connector.py"


def connector(source: str, name: str = CONNECTOR) -> Any:
    """A function `ask(params)` of a file of the connector, whose body is one line each."""
    body = "".join(f"    {line}\n" for line in source.splitlines())
    space: dict[str, Any] = {}
    exec(compile(f"def ask(params):\n{body}", name, "exec"), space)
    return space["ask"]


def leg(**params: Any) -> WatchedLeg:
    return WatchedLeg(params, Notes())


def seen(watched: WatchedLeg) -> list[tuple[str, int, str, bool, str]]:
    return [(read.key, read.line, read.how, read.absent, read.default) for read in watched.notes.report().reads]


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("params['a']", ("a", 2, "[]", False, "")),
        ("params.get('a')", ("a", 2, "get", False, "None")),
        ("params.get('b', 1)", ("b", 2, "get", True, "1")),
        ("'b' in params", ("b", 2, "in", True, "")),
        ("params.pop('b', 7)", ("b", 2, "pop", True, "7")),
        ("params.setdefault('b', 3)", ("b", 2, "setdefault", True, "3")),
        ("list(params.items())", ("a", 2, "items", False, "")),
        ("list(params.values())", ("a", 2, "values", False, "")),
        ("[params[key] for key in params.keys()]", ("a", 2, "[]", False, "")),
    ],
)
def test_a_read_is_noted_with_its_line(line: str, noted: tuple[str, int, str, bool, str]) -> None:
    watched = leg(a=5)
    connector(line)(watched)
    assert seen(watched) == [noted]
    (read,) = watched.notes.report().reads
    assert (read.place, read.function) == ("moriio_connector.py:2", "ask") or read.function == "<listcomp>"


def test_an_absent_key_is_still_an_error() -> None:
    watched = leg(a=5)
    with pytest.raises(KeyError):
        connector("params['b']")(watched)
    assert seen(watched) == [("b", 2, "[]", True, "")]


def test_who_is_not_the_connector_is_not_noted() -> None:
    watched = leg(a=5)
    connector("params['a']", "/somewhere/vllm/v1/core/sched/scheduler.py")(watched)
    assert watched["a"] == 5 and seen(watched) == []


@pytest.mark.parametrize(
    "line", ["dict(params)", "{**params}", "params.copy()", "params | {}", "__import__('copy').copy(params)", "str(params)"]
)
def test_a_copy_reads_nothing(line: str) -> None:
    watched = leg(a=5, b=6)
    connector(f"return {line}")(watched)
    assert seen(watched) == []


def test_copies_that_the_connector_keeps_are_watched_and_others_are_said() -> None:
    class Scheduler:
        kept: dict[str, Any]

    scheduler, watched = Scheduler(), leg(a=5, b=6)
    scheduler.kept = {"r": connector("return dict(params)")(watched)}
    assert watched.notes.report().copied == ("moriio_connector.py:2",)
    follow_copies(scheduler, {"r": watched})
    connector("\nparams['b']")(scheduler.kept["r"])
    assert watched.notes.report().copied == () and seen(watched) == [("b", 3, "[]", False, "")]


def test_a_copy_that_goes_to_another_process_is_said() -> None:
    watched = leg(a=5)
    pickle.dumps([watched])
    assert watched.notes.report().copied == ("a pickle",)


def test_a_copy_and_a_read_of_one_line_are_told_apart() -> None:
    watched = leg(a=5)
    connector("return dict(params)['a'] + params['a']")(watched)
    assert seen(watched) == [("a", 2, "[]", False, "")]


def test_it_is_a_dictionary_in_all_else() -> None:
    plain = {"a": 5, "b": [1, {"c": None}]}
    watched = WatchedLeg(plain, Notes())
    assert isinstance(watched, dict) and watched == plain and plain == watched and repr(watched) == repr(plain)
    assert list(watched) == list(plain) and len(watched) == 2 and list(watched.items()) == list(plain.items())
    for packed in (msgspec.msgpack, msgspec.json):
        assert packed.encode(watched) == packed.encode(plain)
    there = pickle.loads(pickle.dumps({"leg": watched}))["leg"]
    assert type(there) is dict and there == plain
    for other in (copy.copy(watched), copy.deepcopy(watched), watched.copy(), watched | {}):
        assert isinstance(other, WatchedLeg) and other == plain
    copy.deepcopy(watched)["b"].append(2)
    assert watched == plain
    watched["a"] = 6
    assert watched.pop("a") == 6 and watched.pop("a", 7) == 7 and "a" not in watched
    with pytest.raises(KeyError):
        watched.pop("a")
    with pytest.raises(TypeError):
        watched | 3
    watched.update(x=1)
    del watched["x"]
    assert watched == {"b": plain["b"]}


# -- what is told of it ------------------------------------------------------------------------------------------------


def read(key: str, line: int, function: str = "add_new_req", absent: bool = False, default: str = "None") -> KeyRead:
    return KeyRead(key, "moriio_common.py", line, function, "", "get", absent, default)


def as_real(release: str, reads: LegReads, **fields: Any) -> Record:
    """A run of the model as a real tier would have seen it, with these reads of prefill's leg."""
    setup = resolve(build({"release": release, "model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}} | fields))
    record = record_of(run_world(setup)[1])
    history = History()
    history.rows = [(*row[:6], None if row[6] is None else _blind(row[6])) for row in record.history.rows]
    return msgspec.structs.replace(record, tier="connector", history=history, reads={(0, "prefill"): reads})


def _blind(fields: Any) -> Any:
    """What a dial of a real run says: the port, and not whom it meant."""
    return msgspec.structs.replace(fields, dp=None, tp=None) if hasattr(fields, "tp") else fields


def causes(record: Record, kind: str = "wrong-peer") -> list[str]:
    told = judge(record, digest=None, events=0, virtual_ns=None, seconds=0.0, replay="")
    return next(finding.causes for finding in told.findings if finding.kind == kind)


def test_a_finding_names_the_line_that_read_the_size_and_blames_no_map() -> None:
    assert causes(as_real("0.26.0", LegReads((read("tp_size", 476, absent=True, default="1"),)))) == [
        "prefill read `tp_size` (moriio_common.py:476), absent, default 1",
        "`remote_tp_size` = 2 was sent to prefill and never read",
    ]


def test_a_size_that_was_read_right_is_not_blamed_but_the_map_is() -> None:
    (blamed,) = causes(as_real("0.26.0", LegReads((read("remote_tp_size", 485),))))
    assert blamed.startswith("as modelled: release 0.26.0, write_map")


def test_a_size_that_the_router_sent_wrong_is_said_with_its_line() -> None:
    reads = LegReads((read("remote_tp_size", 485),))
    record = as_real("0.27.0", reads, faults=["set:remote_tp_size=1@prefill"])
    assert causes(record) == ["prefill read `remote_tp_size` = 1 (moriio_common.py:485)"]


def test_a_handshake_that_a_later_request_led_elsewhere_is_blamed_on_its_leg() -> None:
    reads = LegReads((read("remote_tp_size", 485),))
    fields = {"requests": 2, "faults": ["set:remote_tp_size=1@prefill#1"]}
    record = as_real("0.27.0", reads, **fields)
    history = History()
    history.rows = [(*row[:4], -1, *row[5:]) if row[1] == "dialled" else row for row in record.history.rows]
    record = msgspec.structs.replace(record, history=history, reads={(0, "prefill"): reads, (1, "prefill"): reads})
    rows = history.rows_of("dialled")
    history.rows = [*history.rows, (rows[-1][0], "dialled", "P1", "D0", -1, -1, rows[0][6])]
    assert causes(record) == ["prefill read `remote_tp_size` = 1 (moriio_common.py:485)"]


def test_where_copies_were_lost_nothing_is_said_to_be_never_read_for_sure() -> None:
    reads = LegReads((read("tp_size", 476, absent=True, default="1"),), ("moriio_connector.py:9",))
    record = as_real("0.26.0", reads)
    assert causes(record)[1] == (
        "`remote_tp_size` = 2 was sent to prefill and never read, unless in the copies made: moriio_connector.py:9"
    )
    (told,) = tell_keys(record)
    assert "unless in the copies made: moriio_connector.py:9" in all_in_words(told)[1]


def test_without_reads_a_policy_is_blamed_as_modelled() -> None:
    record = msgspec.structs.replace(as_real("0.26.0", LegReads()), reads={})
    assert "as modelled: release 0.26.0 reads `tp_size`, which was not sent, default 1" in causes(record)
