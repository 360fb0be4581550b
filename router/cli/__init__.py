"""The command line. A command's module is imported when it is run, so that `--help` is fast."""

from importlib import import_module
from typing import NamedTuple

import click

from router import __version__


class LazyCommand(NamedTuple):
    name: str
    place: str  # "module:attribute"
    summary: str  # shown in the list of commands without importing the module


COMMANDS = (
    LazyCommand("run", "run:run", "Run the router."),
    LazyCommand("demo", "demo:demo", "Watch a router deliver messages on this machine."),
    LazyCommand("send", "send:send", "Publish messages to a queue."),
    LazyCommand("message", "lookup:message", "Show the state of a message."),
    LazyCommand("batch", "batch:batch", "Publish a batch with a callback, or show one."),
    LazyCommand("schedules", "lookup:schedules", "List schedules and their next runs."),
    LazyCommand("status", "status:status", "Show the router's state on one screen."),
    LazyCommand("explain", "lookup:explain", "Explain why a message, group or target is waiting."),
    LazyCommand("warnings", "warnings:warnings", "List, acknowledge and clear warnings."),
    LazyCommand("pools", "config:pools", "Change a pool of the running router."),
    LazyCommand("config", "config:config", "Check a routing configuration."),
    LazyCommand(
        "dead-letters", "dead_letters:dead_letters", "List, replay and discard dead letters."
    ),
    LazyCommand(
        "sample-target", "sample_target:sample_target", "Run an HTTP target to try the router with."
    ),
)


class LazyGroup(click.Group):
    """Inherits because that is how click is extended."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return [command.name for command in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        for command in COMMANDS:
            if command.name == cmd_name:
                module, attribute = command.place.split(":")
                found: click.Command = getattr(import_module(f"router.cli.{module}"), attribute)
                return found
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.summary) for command in COMMANDS])


main = click.version_option(__version__, prog_name="message-router")(
    LazyGroup(
        help="Deliver messages from brokers to HTTP endpoints.",
        epilog="\b\nExit codes: 0 success, 1 failure, 2 wrong usage.\n"
        "Example:    message-router demo",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
)
