"""`config` checks a routing configuration (CFG-8); `pools` changes a pool until the next sync."""

import asyncio
import os
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec
from msgspec.structs import replace

from router.cli.kit import (
    RouterRefused,
    Unreachable,
    connect,
    get,
    in_path,
    json_option,
    plain,
    router_options,
    settings_here,
    show_fields,
    show_json,
)
from router.core.broker import QueueNames
from router.core.config import RoutingConfig
from router.core.config_document import BadDocument, read_document
from router.core.config_entry import KEYS, Problem
from router.core.config_plan import check_document
from router.core.credentials import MAX_FILE_BYTES, BadCredentials, read_credentials, refusal
from router.core.target import read_target
from router.core.warnings import Code
from router.outbound.config_source import config_sources
from router.ports import ConfigUnavailable
from router.settings import Settings

_SCHEMES: Final = ("http", "https", "file")


@click.group(epilog="\b\nExample:  message-router config check routing.json")
def config() -> None:
    """Check a routing configuration."""


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

    If a router is running, the document is compared with its configuration. Queue names are
    resolved with the settings in the environment, as in the router. If
    MESSAGE_ROUTER_CREDENTIALS_FILE is set, targets whose credentials may not go there are errors,
    and secrets that cannot be used here are shown. The exit code is 1 if the document has errors.
    """
    if "://" not in source:
        source = Path(source).resolve().as_uri()
    elif urlsplit(source).scheme not in _SCHEMES:
        raise click.UsageError(f"a configuration comes from a file or by {', '.join(_SCHEMES)}")
    settings = settings_here()
    # As the router would do it: the token goes only to the origin of the first URL.
    urls = (*settings.config_urls, source)
    *_, fetched = config_sources(urls, settings.config_token, settings.naming)
    try:
        body = asyncio.run(fetched.fetch())
    except ConfigUnavailable as error:
        raise click.ClickException(f"{fetched.name}: {error}") from None
    running = _running(settings.naming)
    report = check_document(body, settings.naming, running)
    more = _without_secrets(body, settings)
    report = replace(report, problems=(*report.problems, *more))
    if as_json:
        show_json(
            {
                "ok": report.ok,
                "comparedWithRunningRouter": running is not None,
                "problems": [msgspec.to_builtins(problem) for problem in report.problems],
                "changes": list(report.lines),
            }
        )
    else:
        for problem in report.problems:
            click.echo(plain(str(problem)), err=True)
        for typo in _typos(body):
            click.echo(plain(typo), err=True)
        for line in report.lines or ("Nothing would change.",):
            click.echo(plain(line))
    sys.exit(0 if report.ok else 1)


def _without_secrets(body: bytes, settings: Settings) -> Iterator[Problem]:
    """Yield the entries of `targets` that would send nothing, by the credentials file of here.

    A secret that cannot be used here is no error: the router may be elsewhere, or another user.
    """
    if settings.credentials_file is None:
        return
    from router.outbound.credentials import (  # noqa: PLC0415  on use: takes a while
        read_contents,
        read_private,
    )

    try:
        content, _ = read_private(settings.credentials_file, MAX_FILE_BYTES)
        known = read_credentials(content)
    except BadCredentials as error:
        raise click.UsageError(f"MESSAGE_ROUTER_CREDENTIALS_FILE: {error}") from None
    with suppress(BadDocument):  # reported already
        for entry in read_document(body, settings.naming).config.targets:
            if entry.credentials is not None:
                flaw = refusal(known, entry.credentials, read_target(entry.match))
                if flaw is not None:
                    yield Problem("$.targets", Code.CREDENTIALS, f"{entry.name}: {flaw}")
                    continue
                found = read_contents(known[entry.credentials], os.environ)
                if text := found.problem or found.flaw or found.note:
                    text = f"{entry.name}: credentials {entry.credentials}: {text}"
                    yield Problem("$.targets", Code.CREDENTIALS, text, skipped=False)


def _typos(body: bytes) -> Iterator[str]:
    """Yield each key that is ignored, but looks like one that is not."""
    try:
        document = msgspec.json.decode(body.removeprefix(BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    yield from _typos_in(document, frozenset({*KEYS, "connections"}) - {"retry"}, "$")
    for section, known in KEYS.items():
        entries = document.get(section)
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                path = f"$.{section}[{number}]"
                yield from _typos_in(entry, known, path)
                if isinstance(retry := entry.get("retry"), dict):
                    yield from _typos_in(retry, KEYS["retry"], f"{path}.retry")


def _typos_in(entry: Mapping[str, object], known: frozenset[str], path: str) -> Iterator[str]:
    for key in sorted(entry.keys() - known):
        for meant in get_close_matches(key, known - entry.keys(), n=1):
            yield f"{path}.{key} is ignored: did you mean {meant}?"


def _running(naming: QueueNames) -> RoutingConfig | None:
    """Return what the running router has applied, or print why it cannot be asked."""
    try:
        applied = get("/config")
    except (Unreachable, RouterRefused) as error:
        click.echo(f"Not compared with a running router: {error.message}.", err=True)
        return None
    if not isinstance(applied, dict) or "queues" not in applied:
        raise click.ClickException("what answers there is not a message-router")
    return read_document(msgspec.json.encode(applied), naming).config


@click.group(epilog="\b\nExample:  message-router pools set POOL-A --concurrency 5")
def pools() -> None:
    """Change a pool of the running router."""


@pools.command(
    "set",
    epilog="\b\nExamples:  message-router pools set POOL-A --concurrency 5 --rate 600\n"
    "           message-router pools set POOL-A --rate 0",
)
@click.argument("code", metavar="CODE")
@click.option(
    "--concurrency", type=click.IntRange(min=1), metavar="N", help="Deliveries at the same time."
)
@click.option(
    "--rate", type=click.IntRange(min=0), metavar="N", help="Deliveries per minute; 0 for no limit."
)
@router_options
@json_option
def set_pool(code: str, concurrency: int | None, rate: int | None, as_json: bool) -> None:
    """Change a pool at once. The next configuration sync reverts it.

    Open deliveries finish. Messages that wait for the rate limit are subject to the new one.
    """
    if concurrency is None and rate is None:
        raise click.UsageError("give --concurrency, --rate or both")
    order: dict[str, int | None] = {}
    if concurrency is not None:
        order["concurrency"] = concurrency
    if rate is not None:
        order["rateLimitPerMinute"] = rate or None
    with connect() as router:
        stats = router.call(
            "PUT", f"/monitoring/pools/{in_path(code)}", body=msgspec.json.encode(order)
        )
    if as_json:
        show_json(stats)
    else:
        show_fields(stats)
