"""The command line. A command's module is imported when it is run, so that `--help` is fast."""

import errno
import os
import sys
from importlib import import_module
from typing import Any, Final

import click

from router import __version__

# Name: its module, relative to this one, and a summary that is shown without importing the module.
COMMANDS: Final = {
    "run": (".", "Run the router."),
    "demo": (".demo", "Watch a router deliver messages on this machine."),
    "send": (".send", "Publish messages to a queue."),
    "message": (".lookup", "Show the state of a message."),
    "messages": (".lookup", "List the messages of a queue."),
    "cancel": (".lookup", "Cancel a message."),
    "batch": (".batch", "Publish a batch with a callback, or show one."),
    "schedules": (".lookup", "List schedules and their next runs."),
    "status": (".status", "Show the router's state on one screen."),
    "explain": (".lookup", "Explain why a message, group or target is waiting."),
    "targets": (".lookup", "List targets and what holds their messages back."),
    "warnings": (".lookup", "List, acknowledge and clear warnings."),
    "pools": (".config", "Change a pool of the running router."),
    "config": (".config", "Check a routing configuration."),
    "dead-letters": (".dead_letters", "List, replay and discard dead letters."),
    "groups": (".groups", "List, release and discard groups that wait."),
    "sample-target": (".sample_target", "Run an HTTP target to try the router with."),
}


_INTERRUPTED: Final = 130


class LazyGroup(click.Group):
    """Inherits because that is how click is extended."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            place = error.filename or "the output"
            sys.stderr.write(f"message-router: cannot write {place}: {error.strerror}\n")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """End quietly at Ctrl-C, with the exit code that shells give. Click would end with 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        name = cmd_name.replace("-", "_")
        found: click.Command = getattr(import_module(module, __name__), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


main = click.version_option(__version__, prog_name="message-router")(
    LazyGroup(
        help="Deliver messages from brokers to HTTP endpoints.",
        epilog="\b\nExit codes: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C.\n"
        "Example:    message-router demo",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
)


@click.command(
    epilog="\b\nExample:  MESSAGE_ROUTER_CONFIG_URL=https://config/routing.json message-router run"
)
def run() -> None:
    """Run the router until SIGTERM or Ctrl-C.

    Settings come from the environment. Without any, the router consumes an embedded queue named
    `default`; publish to it with `message-router send`.
    """
    from router.runtime import tune_for_start  # noqa: PLC0415  slow to import

    tune_for_start()
    from router.main import run as run_router  # noqa: PLC0415  slow to import
    from router.setting_values import BadSetting  # noqa: PLC0415  slow to import

    try:
        sys.exit(run_router(os.environ))
    except BadSetting as error:
        click.echo(f"message-router: {error}", err=True)
        sys.exit(2)  # wrong usage
