"""`run`: the service."""

import os
import sys

import click

from router import runtime

_WRONG_SETTING = 2


@click.command(
    epilog="\b\nExample:  MESSAGE_ROUTER_CONFIG_URL=https://config/routing.json message-router run"
)
def run() -> None:
    """Run the router until SIGTERM or Ctrl-C.

    Settings come from the environment. Without any, the router consumes an embedded queue named
    `default`; publish to it with `message-router send`.
    """
    runtime.tune_for_start()
    from router.main import run as run_router  # noqa: PLC0415  slow to import
    from router.settings import BadSetting  # noqa: PLC0415  slow to import

    try:
        sys.exit(run_router(os.environ))
    except BadSetting as error:
        click.echo(f"message-router: {error}", err=True)
        sys.exit(_WRONG_SETTING)
