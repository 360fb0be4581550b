"""A click group that knows its commands by name and imports them on use."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import click


@dataclass(frozen=True, slots=True)
class LazyCommand:
    name: str
    place: str  # "module:attribute"
    summary: str  # shown in the list of commands without importing the module

    def load(self) -> click.Command:
        module, attribute = self.place.split(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.place} is not a command")
        return command


class LazyGroup(click.Group):
    """Inherits because that is how click is extended; only what touches commands is changed."""

    def __init__(self, lazy: Iterable[LazyCommand], *, summary: str, epilog: str) -> None:
        super().__init__(
            help=summary,
            epilog=epilog,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self._lazy = {command.name: command for command in lazy}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        lazy = self._lazy.get(cmd_name)
        return lazy.load() if lazy else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(lazy.name, lazy.summary) for lazy in self._lazy.values()])
