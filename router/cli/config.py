"""`config check`: what is wrong with a routing configuration, and what it would change (CFG-8)."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec

from router.cli.connection import Refused, Unreachable, connect, router_options
from router.cli.environment import settings_here
from router.cli.output import json_option, plain, show_json
from router.core.config import QueueNaming, RoutingConfig
from router.core.config_document import read_document
from router.core.config_plan import CheckReport, check_document
from router.outbound.config_source import config_sources
from router.ports import ConfigUnavailable
from router.settings import Settings

_SCHEMES: Final = ("http", "https", "file")


@click.group(epilog="\b\nExample:  message-router config check routing.json")
def config() -> None:
    """Work with routing configurations."""


@config.command(
    "check",
    epilog="\b\nExamples:  message-router config check routing.json\n"
    "           message-router config check https://config/routing.json --url http://10.0.0.7:8080",
)
@click.argument("source", metavar="URL|FILE")
@router_options
@json_option
def check(source: str, as_json: bool) -> None:
    """Check a routing configuration and print what applying it would change.

    It is compared with the running router if one answers, else with nothing. Queue names are read
    by the settings of the environment, as the router itself would. Exit code 1: something is wrong
    with it.
    """
    settings = _with_source(settings_here(), _as_url(source))
    body = _fetch(settings)
    running = _running(settings.naming)
    report = check_document(body, settings.naming, running)
    if as_json:
        show_json(_for_programs(report, compared=running is not None))
    else:
        _show(report)
    sys.exit(0 if report.ok else 1)


def _as_url(source: str) -> str:
    if "://" not in source:
        return Path(source).resolve().as_uri()
    if urlsplit(source).scheme not in _SCHEMES:
        raise click.UsageError(f"a configuration comes from a file or by {', '.join(_SCHEMES)}")
    return source


def _with_source(settings: Settings, url: str) -> Settings:
    """As the router would be set. The token goes where it goes there: to the first URL's origin."""
    return replace(settings, config_urls=(*settings.config_urls, url))


def _fetch(settings: Settings) -> bytes:
    *_, source = config_sources(settings.config_urls, settings.config_token, settings.naming)
    try:
        return asyncio.run(source.fetch())
    except ConfigUnavailable as error:
        raise click.ClickException(f"{source.name}: {error}") from None


def _running(naming: QueueNaming) -> RoutingConfig | None:
    """What the running router has applied; None, and a word on why, if it cannot be asked."""
    try:
        with connect() as router:
            applied = router.get("/config")
    except (Unreachable, Refused) as error:
        click.echo(f"Compared with nothing: {error.message}.", err=True)
        return None
    if not isinstance(applied, dict) or "queues" not in applied:
        raise click.ClickException("what answers /config there is not a message-router")
    document = read_document(msgspec.json.encode(applied), naming)
    return RoutingConfig(document.queues, document.pools)


def _show(report: CheckReport) -> None:
    for problem in report.problems:
        click.echo(plain(str(problem)), err=True)
    for line in report.lines:
        click.echo(plain(line))
    if not report.lines:
        click.echo("Nothing would change.")


def _for_programs(report: CheckReport, *, compared: bool) -> dict[str, object]:
    return {
        "ok": report.ok,
        "comparedWithRunningRouter": compared,
        "problems": [msgspec.to_builtins(problem) for problem in report.problems],
        "changes": list(report.lines),
    }
