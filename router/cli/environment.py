"""The router's settings, for commands that follow them."""

import os

import click

from router.settings import BadSetting, Settings


def settings_here() -> Settings:
    """What the environment says; a wrong variable is wrong usage."""
    try:
        return Settings.from_env(os.environ)
    except BadSetting as error:
        raise click.UsageError(str(error)) from None
