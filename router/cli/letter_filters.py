"""Which dead letters a command is about."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from router.core.dead_letter import Reason

Command = TypeVar("Command", bound=Callable[..., Any])

_CHOSEN: Final = f"{__name__}.chosen"  # where the filters are kept in click's context


def filter_options(command: Command) -> Command:
    """The options that `chosen_letters` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def chosen_letters() -> dict[str, str | None]:
    """The filters given, as the API names them."""
    chosen: dict[str, str | None] = click.get_current_context().meta[_CHOSEN]
    return chosen


def _choose(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    ctx.meta.setdefault(_CHOSEN, {})[option.name] = value


def _option(
    name: str, text: str, *, metavar: str | None = None, choice: click.Choice[str] | None = None
) -> Callable[[Command], Command]:
    return click.option(
        f"--{name}", metavar=metavar, type=choice, expose_value=False, callback=_choose, help=text
    )


_REASONS: Final = click.Choice([reason.value for reason in Reason], case_sensitive=False)
_OPTIONS: Final = (
    _option("queue", "Only those from this queue.", metavar="NAME"),
    _option("pool", "Only those of this pool.", metavar="CODE"),
    _option("reason", "Only those of this reason.", choice=_REASONS),
    _option("target", "Only those for this target.", metavar="URL"),
    _option("since", "Only those since then, such as 2026-01-31T08:15:30Z.", metavar="TIME"),
)
