"""When an event fault fires: every trigger at the model tier and around real objects of the connector tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcover import build, resolve, run_world
from kvcover.faults import KINDS, parse_fault
from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.inside import injection
from kvcover.real_backend.inside.injection import Injection

THREE: dict[str, Any] = {
    "release": "0.33.0", "model": "layers=3,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}, "fabric": "loopback",
    "requests": [{}, {"arrival_ns": 2_000_000_000}, {"arrival_ns": 4_000_000_000}],
}  # fmt: skip
# A fault of each kind with `pattern`, aimed at something that happens once a request; in READ where that is said.
ONCE_A_REQUEST = {
    "drop-notice": "drop-notice:write_done,to=D0",
    "duplicate-notice": "duplicate-notice:write_done,to=D0,ms=1",
    "delay-notice": "delay-notice:write_done,to=D0,ms=1",
    "reorder-notice": "reorder-notice:write_done,to=D0,ms=1",
    "poison-notice": "poison-notice:release,to=P0",
    "misroute-notice": "misroute-notice:write_done,to=D0,port=9",
    "replay-notice": "replay-notice:write_done,to=D0,ms=1",
    "fail-transfer": "fail-transfer:read,to=D0,layer=1",
    "partial-transfer": "partial-transfer:read,to=D0,layer=1,fraction=0.5",
    "delay-transfer": "delay-transfer:write,to=D0,layer=1,ms=1",
    "late-transfer": "late-transfer:read,to=D0,layer=1,ms=1",
    "lose-completion": "lose-completion:read,to=D0,layer=1",
    "early-completion": "early-completion:write,to=D0,layer=1,ms=1",
    "sq-full": "sq-full:read,to=D0,layer=1",
}
TRIGGERS = {
    "pattern=fpf": {0, 2},
    "pattern=pf": {1},
    "n=1": {1},
    "n=2": {2},
    "after=1500": {1, 2},
    "request=2": {2},
    "request=0": {0},
}
PATTERNED = [kind for kind in KINDS.values() if "pattern" in kind.params]


def test_every_kind_with_a_pattern_is_here() -> None:
    assert set(ONCE_A_REQUEST) == {kind.name for kind in PATTERNED}
    for name in ("from", "to", "n", "request", "pattern", "after"):
        assert all(name in kind.params for kind in PATTERNED), name


def hit(text: str) -> list[int]:
    """The requests on which a fault fired in the model, in order."""
    mode = "read" if ":read" in text or ":release" in text else "write"
    _, world = run_world(resolve(build(THREE | {"mode": mode, "faults": [text]})))
    return [event.request for event in world.history.events("fault_fired")]


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("kind", ONCE_A_REQUEST)
def test_model(kind: str, trigger: str) -> None:
    """Three requests two seconds apart, so the n-th occurrence is that of request n, unless an earlier fault ended it all."""
    expected = TRIGGERS[trigger]
    fatal = kind == "poison-notice"  # the thread that would hear the next ones is dead; they are sent all the same
    assert set(hit(f"{ONCE_A_REQUEST[kind]},{trigger}")) == expected or fatal
    assert len(hit(f"{ONCE_A_REQUEST[kind]},{trigger}")) == len(expected)


@pytest.mark.parametrize(("aim", "expected"), [
    ("", {("P0", "D0"), ("P1", "D1")}), (",from=P1", {("P1", "D1")}), (",to=D0", {("P0", "D0")}), (",from=P,to=D1", {("P1", "D1")}),
])  # fmt: skip
@pytest.mark.parametrize("what", ["delay-notice:write_done,ms=1", "delay-transfer:write,ms=1,layer=0"])
def test_model_from_and_to(what: str, aim: str, expected: set[tuple[str, str]]) -> None:
    """TP 2 on both sides: rank i writes into rank i, and tells it so."""
    _, world = run_world(resolve(build(THREE | {"faults": [what + aim]})))
    assert {(event.actor, event.peer) for event in world.history.events("fault_fired")} == expected


def test_model_layer() -> None:
    _, world = run_world(resolve(build(THREE | {"faults": ["delay-transfer:write,ms=1,layer=2"]})))
    assert {event.layer for event in world.history.events("fault_fired")} == {2}


@pytest.mark.parametrize("fault", ["delay-leg:prefill,ms=1", "delay-step:prefill,ms=1", "fail-leg:decode"])
def test_model_n_of_legs_and_steps(fault: str) -> None:
    """`n` of what comes once a request: exactly one of the three."""
    result, _ = run_world(resolve(build(THREE | {"faults": [f"{fault},n=1"]})))
    assert result.faults[0].fired == 1


# -- the connector tier: the wrappers that its ranks use, with three occurrences ---------------------------------------


class _Wire:
    """A socket and a session that write down what passes."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def send(self, payload: bytes, *_args: Any, **_more: Any) -> None:
        self.passed.append(int.from_bytes(payload, "little"))

    def batch_write(self, local: list[int], _remote: list[int], _sizes: list[int], _uid: int) -> Any:
        self.passed.append(local[0])
        return SimpleNamespace(Succeeded=lambda: True, Failed=lambda: False)


def planned(text: str, tmp_path: Path, requests: int = 3) -> Injection:
    """The faults of one process of a run, P0, in which message and batch number n are those of request n, layer 0."""
    fault = parse_fault(text)
    trial: Any = SimpleNamespace(
        setup=SimpleNamespace(faults=(fault,), requests=[None] * requests),
        book=tmp_path / "book",
        endpoint=lambda _role: SimpleNamespace(rank_name=lambda _dp, tp: f"D{tp}"),
    )
    made = Injection(trial, "prefill", 0, "P0", {})
    made.cell_of = lambda address, at_ns=None: (0, address)  # type: ignore[method-assign]
    return made


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed batch's status says is another test's; here there need not be any `mori`."""
    monkeypatch.setattr(injection, "_status", lambda *_said: "a status")


def notices_that_pass(text: str, tmp_path: Path) -> list[int]:
    made, wire = planned(text, tmp_path), _Wire()
    made.owners = {7: "D0"}
    socket = injection._NoticeSocket(made, wire, "tcp://127.0.0.1", 7)
    socket._read = lambda payload: ("write_done", int.from_bytes(payload, "little"))  # type: ignore[method-assign]
    for number in range(3):
        socket.send(number.to_bytes(1, "little"))
    return wire.passed


def batches_that_pass(text: str, tmp_path: Path) -> list[int]:
    made, wire = planned(text, tmp_path), _Wire()
    session = injection._Session(made, wire, SimpleNamespace(data=0), SimpleNamespace(engine_key="consumer:h:1:tp0:dp0"))
    for number in range(3):
        session.batch_write([number], [0], [1], 0)
    return wire.passed


@pytest.mark.parametrize(
    ("way", "fault"), [(notices_that_pass, "drop-notice:write_done"), (batches_that_pass, "fail-transfer:write")]
)
@pytest.mark.parametrize(("trigger", "passed"), [
    ("pattern=fpf", [1]), ("pattern=pfp", [0, 2]), ("n=1", [0, 2]), ("request=2", [0, 1]), ("after=100000", [0, 1, 2]),
    ("from=P0", []), ("from=P1", [0, 1, 2]), ("to=D", []), ("to=D1", [0, 1, 2]), ("from=P,to=D0,n=0", [1, 2]),
])  # fmt: skip
def test_connector(way: Callable[[str, Path], list[int]], fault: str, trigger: str, passed: list[int], tmp_path: Path) -> None:
    """What fires never reaches the socket or the session; what does not fire passes as it is."""
    assert way(f"{fault},{trigger}", tmp_path) == passed


@pytest.mark.parametrize(("aim", "passed"), [("layer=0,n=0", [1, 2]), ("layer=1", [0, 1, 2])])
def test_connector_layer(aim: str, passed: list[int], tmp_path: Path) -> None:
    """All three batches are of layer 0."""
    assert batches_that_pass(f"fail-transfer:write,{aim}", tmp_path) == passed


def test_connector_after_counts_from_the_start_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before `after` is an occurrence, so `n` and `pattern` count from there."""
    clock = iter([100.0, 100.5, 101.0, 101.5, 102.0])  # the start, then four events
    monkeypatch.setattr("kvcover.real_backend.driver.book.time", SimpleNamespace(monotonic=lambda: next(clock)))
    book = SharedInjector([parse_fault("drop-notice:write_done,after=900,pattern=pf")], tmp_path / "book")
    book.start()
    assert [bool(book.event("notice", "write_done", "P0", "D0", 0)) for _ in range(4)] == [False, False, True, False]
