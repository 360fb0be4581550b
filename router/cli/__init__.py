"""The command line. A command's module is imported when it is run, so that `--help` is quick."""

import click

from router import __version__
from router.cli.lazy import LazyCommand, LazyGroup

COMMANDS = (
    LazyCommand("run", "router.cli.run:run", "Run the router."),
    LazyCommand("demo", "router.cli.demo:demo", "Show messages going through, on this machine."),
    LazyCommand("send", "router.cli.send:send", "Put messages into a queue."),
    LazyCommand("status", "router.cli.status:status", "Show on one screen how the router does."),
    LazyCommand("explain", "router.cli.explain:explain", "Tell why something is not delivered."),
    LazyCommand("warnings", "router.cli.warnings:warnings", "List, acknowledge, clear warnings."),
    LazyCommand("pools", "router.cli.pools:pools", "Change the pools of the running router."),
    LazyCommand("config", "router.cli.config:config", "Check a routing configuration."),
    LazyCommand("dead-letters", "router.cli.dead_letters:dead_letters", "Look after dead letters."),
    LazyCommand("sample-target", "router.cli.sample_target:sample_target", "A target to try with."),
)

main = LazyGroup(
    COMMANDS,
    summary="One service between message brokers and HTTP endpoints.",
    epilog="\b\nExit codes: 0 ok, 1 failed, 2 wrong usage.\nExample:    message-router demo",
)
main = click.version_option(__version__, prog_name="message-router")(main)
