"""The command `kvcover`: a thin shell that imports a command when it is asked for, and neither numpy nor a backend by itself.

Commands are named by where they are, as tiers are in `sim.tiers`: the package works without installed metadata.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO, cast

import click

from kvcover import __version__
from kvcover.sim.commands.lazy import LazyGroup
from kvcover.sim.errors import Inconclusive, InputError, nearest, plain, short
from kvcover.sim.plain import harmless
from kvcover.sim.signals import Ended, unwind_on_signals

COMMANDS = {
    "run": "kvcover.sim.commands.run:command",
    "matrix": "kvcover.sim.commands.matrix:command",
    "releases": "kvcover.sim.commands.lists:releases",
    "models": "kvcover.sim.commands.lists:models",
    "routers": "kvcover.sim.commands.lists:routers",
    "compat": "kvcover.sim.commands.compat:command",
    "diagnose": "kvcover.sim.commands.diagnose:command",
    "router": "kvcover.sim.commands.router:command",
    "faults": "kvcover.sim.commands.lists:faults",
    "why": "kvcover.sim.commands.why:command",
    "corpus": "kvcover.sim.commands.corpus:command",
    "explore": "kvcover.sim.commands.explore:explore",
    "schema": "kvcover.sim.commands.schema:command",
    "report": "kvcover.sim.commands.report:command",
    "export-test": "kvcover.sim.commands.export_test:command",
    "replay": "kvcover.sim.commands.replay:command",
    "vllm": "kvcover.real_backend.commands.vllm:command",
    "mori": "kvcover.real_backend.commands.mori:command",
    "vllm-tests": "kvcover.real_backend.commands.vllm_tests:command",
    "confirm": "kvcover.real_backend.commands.confirm:command",
    "compare": "kvcover.real_backend.commands.compare:command",
    "doctor": "kvcover.real_backend.commands.doctor:command",
}


class Commands(LazyGroup):
    """The group of all commands; errors are one line and exit code 2."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _left_to_main():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """As click does, but a usage error that doesn't know its command is told."""
        try:
            with _left_to_main():
                return super().invoke(ctx)
        except click.UsageError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                error.ctx = click.Context(command, ctx, ctx.invoked_subcommand)
            raise


@contextlib.contextmanager
def _left_to_main() -> Iterator[None]:
    """What ends a command early: click itself would print an empty line for the one, and exit with 1 for the other."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise click.Abort from stop
    except BrokenPipeError:
        raise ReaderLeft from None


class ReaderLeft(Exception):
    """Nobody reads standard output any more, as after `| head`."""


@click.group(cls=Commands, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="kvcover")
def kvcover() -> None:
    """Which KV cells does decode get? Simulates vLLM's MoRI-IO connector rank by rank, injects faults, and runs the
    same scenarios on the real connector.

    Start with `kvcover matrix`, then `kvcover run --release 0.26.0 --prefill tp=8 --decode tp=8`.
    """


def main() -> None:
    """Run the command; every expected error is one line on stderr and exit code 2."""
    if sys.stdout is None:  # its number would be that of the next file or socket
        fail("standard output: is closed; leave it open, as with >/dev/null")
    try:
        os.getcwd()
    except OSError as error:
        fail(f"current folder: can't be told: {error.strerror}; go to one that is there")
    _degrade_characters()
    unwind_on_signals()
    try:
        code = _run()
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        _discard_output()
        code = 141  # as of a program that SIGPIPE ended
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        fail(f"standard output: can't be written: {error.strerror or error}; free the disk, or use -o FILE")
    sys.exit(code)


def _run() -> int:
    """The exit code of the command."""
    try:
        code = kvcover.main(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except InputError as error:
        fail(str(error), error.exit_code)
    except Inconclusive as error:
        fail(f"inconclusive: {error}", error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        fail(_one_line(error))
    except click.ClickException as error:
        fail(error.format_message())
    except (click.Abort, KeyboardInterrupt) as stop:
        if isinstance(ended := stop.__cause__ or stop, Ended):
            fail(f"ended by {ended.name}", 128 + ended.number)
        fail("interrupted", 130)


def _one_line(error: click.UsageError) -> str:
    """Click's usage error with the place, the value and the nearest right option."""
    params = error.ctx.command.params if error.ctx else []
    if isinstance(error, click.NoSuchOption):
        options = [name for param in params for name in param.opts]
        return f"{error.option_name}: no such option; {nearest(error.option_name or '', options)}"
    text = error.format_message().rstrip(".")
    for param in params:
        if isinstance(error, click.BadOptionUsage) and isinstance(param, click.Option) and error.option_name in param.opts:
            given = [word for word in sys.argv if word.startswith(f"{error.option_name}=")]
            value = f", not {short(given[0].partition('=')[2])}" if given else ""
            form = f"{error.option_name} {param.metavar or ''}".strip()
            return f"{text}{value}; write {form} ({(param.help or '').rstrip('.')})"
    hint = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    return f"{text}{hint}"


def fail(text: str, code: int = 2) -> NoReturn:
    """One line on stderr, then exit. Long words and characters that can't be shown are cut and escaped."""
    words = [word if len(word) <= 160 else f"{word[:100]}...{word[-40:]}" for word in text.split()]
    line = plain(" ".join(words))
    if len(line) > 1200:
        line = f"{line[:800]} ... {line[-300:]}"
    click.echo(f"kvcover: {line}", err=True)
    sys.exit(code)


# -- standard output ---------------------------------------------------------------------------------------------

_ASCII = {"→": "->", "←": "<-", "–": "-", "×": "x", "…": "...", "≥": ">="}


def _degrade_characters() -> None:
    """What the terminal's encoding lacks is written in other characters; it is no reason to fail."""
    codecs.register_error("kvcover", _other_characters)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="kvcover")
        sys.stdout = cast(TextIO, _Plain(sys.stdout))


class _Plain:
    """Standard output to which no text of a file brings anything that would steer the terminal; nothing here prints colours."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what is plain of it."""
        self._stream.write(harmless(text))
        return len(text)


def _other_characters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _discard_output() -> None:
    """Python flushes standard output when it exits; by then nobody must be there to complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
