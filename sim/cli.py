"""The command `kvcover`: a thin shell over entry points, so that it imports neither numpy nor a backend by itself.

Commands come from the entry-point group `kvcover.commands`, tiers from `kvcover.tiers`.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

import click

from sim.errors import InputError, nearest


class Commands(click.Group):
    """A group whose commands are loaded when they are asked for; errors are one line and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(point.name for point in entry_points(group="kvcover.commands"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        points = {point.name: point for point in entry_points(group="kvcover.commands")}
        if cmd_name not in points:
            return None
        command = points[cmd_name].load()
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise InputError("kvcover", f"no command {name!r}", nearest(name, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvcover")
def kvcover() -> None:
    """Which KV cells does decode get? Simulates vLLM's MoRI-IO connector rank by rank, injects faults, and runs the
    same scenarios on the real connector.

    Start with `kvcover matrix`, then `kvcover run --release 0.26.0 --prefill tp=8 --decode tp=8`.
    """


def main() -> None:
    """Run the command; every expected error is one line on stderr and exit code 2."""
    try:
        kvcover.main(standalone_mode=False)
    except InputError as error:
        fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        fail(_one_line(error))
    except click.ClickException as error:
        fail(error.format_message())
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except BrokenPipeError:
        # the reader went away, as `| head` does; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _one_line(error: click.UsageError) -> str:
    """Click's usage error with the place and the nearest right option."""
    if isinstance(error, click.NoSuchOption):
        options = [name for param in (error.ctx.command.params if error.ctx else []) for name in param.opts]
        return f"{error.option_name}: no such option; {nearest(error.option_name or '', options)}"
    text = error.format_message().rstrip(".")
    hint = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    return f"{text}{hint}"


def fail(text: str, code: int = 2) -> None:
    """One line on stderr, then exit."""
    click.echo("kvcover: " + " ".join(text.split()), err=True)
    sys.exit(code)
