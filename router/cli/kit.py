"""Shared by the commands: calls to a running router, their options, and output.

Output is a table on a terminal, tab-separated lines in a pipe, and JSON on request.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar
from urllib.parse import quote

import click
import httpx
import msgspec

from router.core.message import CONTROL
from router.core.redact import public_uri
from router.setting_values import BadSetting
from router.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Query = Mapping[str, object] | None  # what is None is left out

TIMEOUT_SECONDS: Final = 30.0
_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  read, not bound
_ACCESS: Final = f"{__name__}.access"  # where click's context keeps the options

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_WIDEST_COLUMNS: Final = 100_000


class Unreachable(click.ClickException):
    """Nothing answers there. Shown as one line, exit code 1."""


class RouterRefused(click.ClickException):
    """The router answered with an error. Shown as one line, exit code 1."""

    def __init__(
        self, status: int, problem: Mapping[str, Any], *, gave_credentials: bool = False
    ) -> None:
        self.status = status
        self.problem = problem
        reason = problem.get("detail") or problem.get("title") or "no reason given"
        text = f"the router refused ({status}): {reason}"
        if status == httpx.codes.UNAUTHORIZED:
            wanted = "refuses these credentials" if gave_credentials else "asks for credentials"
            text = (
                f"the router {wanted}: set MESSAGE_ROUTER_API_TOKEN, or"
                " AUTH_BASIC_USERNAME and AUTH_BASIC_PASSWORD"
            )
        super().__init__(text)


@contextmanager
def connect() -> Iterator["RouterClient"]:
    """Open a connection for a few calls. An error on it ends the command in one line."""
    access = click.get_current_context().meta[_ACCESS]
    url, token, user = access["url"], access["token"], access["user"]
    name, colon, password = (user or "").partition(":")
    if user and not token and not colon:
        raise click.UsageError("--user must be NAME:PASSWORD")
    try:
        with httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            auth=(name, password) if user and not token else None,
            timeout=TIMEOUT_SECONDS,
            trust_env=False,  # a proxy is for the internet
        ) as client:
            yield RouterClient(client)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        text = f"--url must be a URL such as http://127.0.0.1:8080 ({error})"
        raise click.UsageError(text) from None
    except httpx.HTTPError as error:
        why = str(error) or "timeout"
        raise Unreachable(f"no router answers at {public_uri(url)}: {why}") from None


def get(path: str, query: Query = None) -> Any:
    """Ask the router once."""
    with connect() as router:
        return router.get(path, query)


class RouterClient:
    """The running router, as far as the command line asks."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, query: Query = None) -> Any:
        return self.call("GET", path, query)

    def call(self, method: str, path: str, query: Query = None, body: bytes | None = None) -> Any:
        given = {  # what was asked for, with booleans spelled as JSON does
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in (query or {}).items()
            if value is not None
        }
        headers = {"Content-Type": "application/json"} if body is not None else None
        return _answer(
            self._client.request(method, path, params=given, content=body, headers=headers)
        )

    def health(self) -> Any:
        """Return the health, also if the router answers 503: it does when it is unhealthy."""
        reply = self._client.get("/health")
        is_down = reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
        return _json(reply) if is_down else _answer(reply)


def in_path(name: str) -> str:
    return quote(name, safe="")


def do_each(names: Sequence[str], act: Callable[[str], object]) -> int:
    """Call `act` with each name, as a part of a path. A refusal does not stop the others."""
    refused = 0
    for name in names:
        try:
            act(in_path(name))
        except RouterRefused as error:
            refused += 1
            click.echo(f"{name}: {error.message}", err=True)
    if refused:
        raise click.ClickException(f"{refused} of {len(names)} were refused")
    return len(names)


def settings_here() -> Settings:
    """Read the router's settings from the environment. A wrong variable is wrong usage."""
    try:
        return Settings.from_env(os.environ)
    except BadSetting as error:
        raise click.UsageError(str(error)) from None


def _answer(reply: httpx.Response) -> Any:
    if reply.is_success:
        return _json(reply) if reply.content else {}
    problem = _json(reply) if reply.headers.get("content-type", "").endswith("json") else {}
    raise RouterRefused(
        reply.status_code,
        problem if isinstance(problem, dict) else {},
        gave_credentials="authorization" in reply.request.headers,
    )


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        place = reply.url.copy_with(query=None)
        raise click.ClickException(f"{place} is not a message-router") from None


def _default_url() -> str:
    host = os.environ.get("MESSAGE_ROUTER_HOST", "").strip()
    host = _WILDCARDS.get(host, host)
    port = os.environ.get("MESSAGE_ROUTER_PORT", "").strip() or "8080"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def keep_in(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Return a callback that keeps an option in click's context instead of giving it away."""

    def keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        ctx.meta.setdefault(key, {})[option.name] = value

    return keep


def _default_user() -> str | None:
    name = os.environ.get("AUTH_BASIC_USERNAME")
    return f"{name}:{os.environ.get('AUTH_BASIC_PASSWORD', '')}" if name else None


def router_options(command: Command) -> Command:
    """Add the options that `connect` reads. The command itself does not see them."""
    option = partial(click.option, expose_value=False, callback=keep_in(_ACCESS))
    for add in (
        option(
            "--user",
            metavar="NAME:PASSWORD",
            default=_default_user,
            help="For auth mode BASIC. Safer: AUTH_BASIC_USERNAME and AUTH_BASIC_PASSWORD.",
        ),
        option(
            "--token",
            metavar="TOKEN",
            envvar="MESSAGE_ROUTER_API_TOKEN",
            help="For auth mode TOKEN. Safer: MESSAGE_ROUTER_API_TOKEN, which `ps` cannot show.",
        ),
        option(
            "--url",
            metavar="URL",
            default=_default_url,
            help="The router's API. Default: MESSAGE_ROUTER_HOST and MESSAGE_ROUTER_PORT,"
            " else http://127.0.0.1:8080.",
        ),
    ):
        command = add(command)
    return command


def show_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str) -> None:
    """Print one line per row. In a pipe there is no heading, for `cut` and `wc`."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(plain(row.get(column)) for column in columns))
        return
    if not rows:
        click.echo(empty)
        return
    from rich.console import Console  # noqa: PLC0415  slow to import
    from rich.table import Table  # noqa: PLC0415  slow to import
    from rich.text import Text  # noqa: PLC0415  slow to import

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(plain(row.get(column))) for column in columns))
    Console(width=_WIDEST_COLUMNS).print(table)  # the terminal wraps long lines; nothing is cut off


def show_fields(fields: Mapping[str, Any]) -> None:
    """Print one field per line."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {plain(value)}")


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many are done: on a terminal, nowhere else."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich import progress  # noqa: PLC0415  slow to import
    from rich.console import Console  # noqa: PLC0415  slow to import

    done_of_all = progress.TextColumn(f"{{task.completed:,.0f}} of {total or 0:,} {what}")
    done_and_rate = progress.TextColumn(
        f"{{task.completed:,.0f}} {what}, {{task.fields[rate]:,.0f}}/s"
    )
    columns: Sequence[progress.ProgressColumn] = (
        (progress.SpinnerColumn(), done_and_rate)
        if total is None
        else (progress.BarColumn(), done_of_all, progress.TimeRemainingColumn())
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, started = bar.add_task(what, total=total, rate=0.0), time.monotonic()

        def show(done: int) -> None:
            bar.update(task, completed=done, rate=done / (time.monotonic() - started))

        yield show


class AnyCaseChoice(click.Choice[str]):
    """Choices in upper case, as everything else shows them. Click would show them in lower case."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__([*names], case_sensitive=False)

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        return super().normalize_choice(choice, ctx).upper()


def interval_option(default: float) -> Callable[[Command], Command]:
    return click.option(
        "--interval",
        type=click.FloatRange(0.1, 3600),
        default=default,
        show_default=True,
        metavar="SECONDS",
        help="How often to ask, with --watch.",
    )


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Set an event, too: where Python has to ignore exceptions, Ctrl-C would be lost."""
    pressed = Event()

    def press(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def changes(ask: Callable[[], Any], interval: float) -> Iterator[Any]:
    """Ask again and again. Yield the answer whenever it has changed.

    A router that has answered once may be restarted meanwhile.
    """
    before, lost = None, False
    with ctrl_c() as pressed:
        while not pressed.is_set():
            try:
                found, lost = ask(), False
            except httpx.TransportError as error:
                if before is None:
                    raise
                if not lost:
                    click.echo(f"no answer ({error}); still waiting …", err=True)
                found, lost = before, True
            if found != before:
                yield found
                before = found
            time.sleep(interval)
    raise KeyboardInterrupt


def plain(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return CONTROL.sub(" ", text)  # what others wrote must not control the terminal
