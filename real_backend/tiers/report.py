"""From what a connector run saw to the result that every tier gives."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from kvcover.real_backend.driver.race import race_of
from kvcover.real_backend.driver.reports import RunSeen
from kvcover.real_backend.driver.trial import Trial
from kvcover.real_backend.inside.mori_kind import NOT_SHOWN
from kvcover.real_backend.machine.environment import environment
from kvcover.real_backend.machine.identity import Identity, identify, number_of
from kvcover.real_backend.machine.trees import Tree
from kvcover.sim.errors import TierError
from kvcover.sim.results.chains import span
from kvcover.sim.results.depart import steps_of
from kvcover.sim.results.judge import judge
from kvcover.sim.results.keys import tell_keys
from kvcover.sim.results.result import STAND_IN, Result
from kvcover.sim.results.story import story
from kvcover.sim.simulate import replay_line

_LOG_LINES = 40
ON_GPU = "KVCOVER_DEVICE=cuda "
"""What stands before a command line for caches in GPU memory."""


def to_result(
    trial: Trial, seen: RunSeen, trees: tuple[Tree, Tree], infos: tuple[dict[str, Any], dict[str, Any]], vllm: str | None
) -> Result:
    """What the judge makes of a run, and what ran."""
    setup = trial.setup
    return judge(
        seen.record,
        release=_release(trees[0], infos[0], setup.prefill.release.name),
        decode_release=_release(trees[1], infos[1], setup.decode.release.name),
        digest=None,
        events=len(seen.record.history),
        virtual_ns=None,
        seconds=seen.seconds,
        replay=f"{ON_GPU if _device(infos) == 'cuda' else ''}{replay_line(setup.scenario)} --tier connector"
        + (f" --mori {infos[0]['mori_version']}" if infos[0]["mori"] != STAND_IN else "")
        + (f" --vllm {vllm}" if vllm else ""),
        backend=_backend(trial, seen, infos),
    )


def _release(tree: Tree, info: dict[str, Any], name: str) -> str:
    """What ran, as the files that were imported say; a working copy with the name of its folder.

    Raises TierError if these are not the files that were chosen, or if they are of another release than `name`, by whose rules
    the scenario was run.
    """
    if tree.files and dict(tree.files) != info["connector_files"]:
        text = "the connector that was imported is not the one that was chosen"
        raise TierError("--vllm", text, "leave its files as they are while it runs, and no other vllm on PYTHONPATH")
    known, said = identity_of(info), str(tree.version or info["vllm"] or name)
    if known.exact and not known.is_release(name):
        raise TierError("--vllm", f"the scenario was run as {name}, and what was imported is {known.text}", f"name {known.text}")
    text = said if known.exact and number_of(said) == known.release else known.text if known.release else f"{said}, {known.text}"
    return text if tree.kind != "working copy" else f"{text} ({tree.path.name if tree.path else 'installed'})"


def identity_of(info: Mapping[str, Any]) -> Identity:
    """Which connector an engine's processes imported, as `describe` tells of it."""
    return identify(info["connector_files"], info["vllm"])


def _backend(trial: Trial, seen: RunSeen, infos: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    prefill, decode = (
        {key: value for key, value in info.items() if key != "head_axis"} | {"identity": identity_of(info).text} for info in infos
    )
    race = race_of(trial, seen)
    return {
        **_mori(infos),
        "device": _device(infos),
        "cells": "tagged 4-byte values",
        "layer_collectives": True,
        "prefill_vllm": prefill,
        "decode_vllm": decode,
        "timers_s": {
            "transfer_timeout": round(trial.limits.transfer_s, 3),
            "defer_timeout": round(trial.limits.defer_s, 3),
            "recv_abort_timeout": round(trial.limits.read_abort_s, 3),
        },
        "environment": environment(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "race": asdict(race) if race else None,
        "stories": [story(seen.record, request.index) for request in trial.setup.requests],
        "keys": msgspec.to_builtins(tell_keys(seen.record)),
        "wrong_cells": msgspec.to_builtins(list(seen.record.wrong)),
        "tracebacks": _tracebacks(seen),
        "events": msgspec.to_builtins(steps_of(seen.record.history.rows)),
        "log_tail": _log(seen),
    }


def _mori(infos: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Which `mori.io` moved the bytes and, of a real one, what its software NIC leaves open."""
    name = str(infos[0]["mori"])
    return {"mori": name} if name == STAND_IN else {"mori": name, "mori_does_not_show": list(NOT_SHOWN)}


def _device(infos: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """The kind of device whose memory held the caches."""
    return str(infos[0].get("device", "cpu")).partition(":")[0]


def _tracebacks(seen: RunSeen) -> list[dict[str, str]]:
    """Every exception with its traceback: those that ended something, then those that the connector caught and logged."""
    caught = [(each, "caught and logged") for rank in seen.ranks for each in rank.caught]
    return [
        {"rank": each.rank, "call": each.call, "error": each.kind, "text": each.text, "place": each.place, "effect": effect,
         "traceback": each.traceback}
        for each, effect in [*((each, "raised") for each in seen.raised), *caught]
    ]  # fmt: skip


def _log(seen: RunSeen) -> list[str]:
    lines = [f"{each.rank} {each.call}: {each.kind}: {each.text}" for each in seen.raised]
    told: dict[str, list[str]] = {}
    for rank in seen.ranks:
        for text in rank.warnings:
            if "experimental" not in text:  # vLLM says so of every KV connector
                told.setdefault(text, []).append(rank.name)
    lines += [f"{span(dict.fromkeys(ranks))}: {text}" for text, ranks in told.items()]
    return lines[-_LOG_LINES:]
