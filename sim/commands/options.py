"""Options that several commands share, and how they become a scenario."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.progress import ASKED
from kvcover.sim.tiers import MORI, TIERS, Tier, refuse_options

if TYPE_CHECKING:
    from kvcover.sim.results.depart import Step
    from kvcover.sim.results.result import Result
    from kvcover.sim.results.verdict import Verdict
    from kvcover.sim.scenario.scenario import Mode, Scenario

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class WholeNumber(click.types.IntParamType):
    """An option's number in plain digits; click's own `int` takes 1_6 and ٤ too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from kvcover.faults.read import plain_int

        try:
            return value if isinstance(value, int) else plain_int(value)
        except ValueError:
            self.fail(f"{short(value)} is not an integer, such as 7", param, ctx)


def tier_option(what: str = "Where to run", default: str = "model") -> Decorator:
    """`--tier`, which takes any name of the table of tiers."""
    *names, last = TIERS
    help_text = f"{what}: {', '.join(names)} or {last}."
    return click.option("--tier", default=default, show_default=True, metavar="T", help=help_text)


_RELEASES: tuple[Decorator, ...] = (
    click.option("--release", metavar="R", help="vLLM release of both engines, e.g. 0.33.0 (default: newest)."),
    click.option("--decode-release", metavar="R", help="Another release for decode."),
)
_FIELDS: tuple[Decorator, ...] = (
    click.option("--model", metavar="M", help="Preset, config.json, layers=2,kv_heads=8,head_dim=8, layers=2,mla=64+16."),
    click.option("--router", metavar="NAME|FILE", help="Who fills in the params, e.g. 'vllm-router 0.1.15' or a file with legs "
                 "(legs.json, legs.toml; default: toy-proxy)."),
    click.option("--fault", "faults", multiple=True, metavar="FAULT",
                 help="drop:KEY, set:KEY=JSON, rename:KEY=NEW (@prefill, @decode), or see `kvcover faults`. Repeatable."),
    click.option("--override", "overrides", multiple=True, metavar="FIELD=POLICY",
                 help="Exchange one policy of the release; see `kvcover releases`. Repeatable."),
    click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE",
                 help="Any other field of a scenario, e.g. timers.defer_timeout_s=5. Repeatable."),
    click.option("--seed", type=WholeNumber(), metavar="N", help="Decides ties between events of one instant."),
    tier_option(),
)  # fmt: skip
_MORI: Decorator = click.option(
    "--mori", metavar="stand-in|library|VERSION",
    help="The mori.io of the connector tier: ours (default), or AMD's own over a software NIC; see `kvcover mori`.",
)  # fmt: skip
_JSON: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
_RESULT: tuple[Decorator, ...] = (
    click.option("--vllm", metavar="R|PATH|installed", help="The vLLM that a real tier runs (default: that of --release)."),
    _MORI,
    _JSON,
    click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well."),
    click.option("--check", is_flag=True, help="Exit with 1 if the result is not as it should be, 3 if it shows nothing."),
)


def _ask_for_progress(_ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked:
        os.environ[ASKED] = "1"


def progress_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--progress`, for logs; on a terminal progress is always shown."""
    text = "Say on stderr how far it is, and how long it will take, also where that is no terminal."
    return click.option("--progress", is_flag=True, expose_value=False, callback=_ask_for_progress, help=text)(function)


def mori_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--mori` for a command that has not all options of a scenario."""
    return _MORI(function)


def choose_mori(tier: Tier, mori: str | None) -> None:
    """Let the tier run the `mori.io` that `--mori` names. Raises InputError if it runs none."""
    refuse_options(tier, {"--mori": mori})
    if mori is not None:
        os.environ[MORI] = mori


_CAUSES: tuple[Decorator, ...] = (
    click.option("--causes", is_flag=True, help="Of a bad run: flip each policy, key and fault, and say what heals it."),
    click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                 help="With --causes: try pairs of flips too, for so long."),
)  # fmt: skip


def causes_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What asks for causes that are shown, and not only named."""
    for option in reversed(_CAUSES):
        function = option(function)
    return function


def check_causes(causes: bool, budget: float | None) -> None:
    """Raise InputError for a budget that nobody spends."""
    if budget is not None and not causes:
        raise InputError("--budget", f"{budget:g} s, and no search to spend them on", "add --causes")


def scenario_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """All options that describe a scenario and what to do with its result."""
    for option in reversed((*_RELEASES, *_FIELDS, *_RESULT, progress_option)):
        function = option(function)
    return function


def field_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a scenario for whichever release, and `--json`."""
    for option in reversed((*_FIELDS, _MORI, _JSON, progress_option)):
        function = option(function)
    return function


def scenario_data(file: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The scenario's dictionary: the file first, then every option over it."""
    from kvcover.sim.scenario.scenario import check_tables, load, set_field

    data: dict[str, Any] = {} if file is None else load(file)
    check_tables(data)
    for name in ("release", "decode_release", "model", "router", "seed"):
        if options.get(name) is not None:
            data[name] = options[name]
    if options.get("faults"):
        data["faults"] = [*_list_of(data, "faults"), *options["faults"]]
    for text in options.get("overrides") or ():
        field, policy = _pair("--override", text, "FIELD=POLICY")
        data.setdefault("overrides", {})[field] = policy
    for text in options.get("sets") or ():
        path, value = _pair("--set", text, "FIELD=VALUE")
        set_field(data, path, _json_or_text(path, value))
    check_tables(data)
    return data


def _list_of(data: dict[str, Any], field: str) -> list[Any]:
    value = data.get(field, [])
    if not isinstance(value, list):
        raise InputError(field, f"{short(value)} is not a list", "write a list of faults")
    return value


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(option, f"can't read {short(text)}", f"write {form}")
    return name, value


def _json_or_text(path: str, value: str) -> Any:
    from kvcover.faults.read import UnfitJson, plain_json

    try:
        return plain_json(value)
    except UnfitJson as error:
        raise InputError(f"--set {path}", f"{short(value)} {error}", "give a plain value") from None
    except ValueError:
        return value


_SIZES = ("tp", "dp", "pods", "instances")


def sizes(option: str, text: str | None) -> dict[str, int]:
    """`tp=4,dp=2`, `tp=4,dp=2,pods=2`, `tp=4,instances=2`, or just `4`."""
    if text is None:
        return {}
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            name, value = "tp", name
        if name not in _SIZES:
            raise InputError(option, f"no size {short(name)} in {short(text)}", nearest(name, _SIZES))
        if name in found:
            raise InputError(option, f"{name} is given twice in {short(text)}", "write tp=4,dp=2")
        found[name] = whole_number(option, value, text)
    return found


def whole_number(option: str, value: str, text: str) -> int:
    """`value`, a part of `text`, as a number."""
    from kvcover.faults.read import plain_int

    try:
        return plain_int(value)
    except ValueError:
        problem = f"{short(value)} in {short(text)} is not a whole number"
        raise InputError(option, problem, "write a number such as 4") from None


def tp_list(option: str, text: str) -> list[int]:
    """`1,2,4,8` in the order given, each once."""
    values = [whole_number(option, part.strip().removeprefix("tp="), text) for part in text.split(",")]
    for value in values:
        if not 1 <= value <= 256:
            raise InputError(option, f"{value} is no TP size", "use 1 to 256")
        if values.count(value) > 1:
            raise InputError(option, f"{value} is given twice in {text!r}", "give each size once")
    return values


def release_list(text: str) -> list[str]:
    """`0.27.0,0.33.0` or `all`, each once, by the names that the model has for them."""
    from kvcover.sim.releases.records import PUBLISHED, get_release

    if text == "all":
        return list(PUBLISHED)
    return list(dict.fromkeys(get_release(part.strip(), "--release").name for part in text.split(",")))


def modes_of(text: str) -> list[Mode]:
    """`write`, `read`, or both."""
    if text not in ("write", "read", "both"):
        raise InputError("--mode", f"no mode {text!r}", nearest(text, ("write", "read", "both")))
    return ["write", "read"] if text == "both" else ["write" if text == "write" else "read"]


def build_scenario(data: dict[str, Any]) -> Scenario:
    """`kvcover.sim.scenario.scenario.build`, imported only now."""
    from kvcover.sim.scenario.scenario import build

    return build(data)


def write_output(path: str | None, content: str | bytes, option: str = "-o") -> None:
    """Write a result file, text or a picture, whole or not at all; where `path` is a link, the file that it points to."""
    if path is None:
        return
    target = _output_file(path, option)
    name = target.parent / f".kvcover-{os.urandom(6).hex()}"
    try:
        with open(name, "xb") as file:  # with the mode that the umask leaves
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(name, target)
    except OSError as error:
        raise InputError(option, f"can't write {path!r}: {error.strerror}", "name a file in a folder that exists") from None
    finally:
        name.unlink(missing_ok=True)


def write_trace(path: str, scenario: Scenario, result: Result, steps: Sequence[Step]) -> None:
    """Write the events of a run: as a timeline for Perfetto, or one a line if the file's name ends in `.jsonl`."""
    from kvcover.sim.results.trace import lines, trace
    from kvcover.sim.scenario.setup import resolve

    several = len((result.backend or {}).get("hosts", {})) > 1
    text = lines(steps) if path.endswith(".jsonl") else trace(resolve(scenario), steps, one_clock=not several)
    write_output(path, text, "--trace")


def check_output(path: str | None, *inputs: object, option: str = "-o") -> None:
    """Complain about an output that can't be written, or that is one of the `inputs`, before a long run, not after it."""
    if path is None:
        return
    target = _output_file(path, option)
    files = [name for name in inputs if isinstance(name, str) and name and "\0" not in name]
    if str(target) in {os.path.realpath(name) for file in files for name in (file, f"{file}/config.json")}:
        raise InputError(option, f"{path!r} is read by this run, and would be overwritten", "name another file")


def _output_file(path: str, option: str) -> Path:
    """What is to be written: a regular file, or none yet, in a folder that exists and may be written to."""
    try:
        target = Path(os.path.realpath(path))
        is_new = not (target.exists() or target.is_symlink())
        bad = "" if path and (is_new or target.is_file()) else "it is no regular file"
        if not target.parent.is_dir():
            bad = "there is no such folder"
        elif not os.access(target.parent, os.W_OK):
            bad = "its folder can't be written to"
    except (OSError, ValueError) as error:  # a name with a null byte is no name
        target, bad = Path(), getattr(error, "strerror", None) or str(error)
    if bad:
        raise InputError(option, f"can't write {path!r}: {bad}", "name a file in a folder that exists")
    return target


def conclude(verdict: Verdict, failed: str = "check failed") -> None:
    """Return if the judge passes it; else say each reason on a line of its own, and exit with the judge's code."""
    said = failed if verdict.status == "fail" else verdict.status
    for reason in verdict.reasons:
        click.echo(f"kvcover: {said}: {reason}", err=True)
    if not verdict.passed:
        sys.exit(verdict.exit_code)
