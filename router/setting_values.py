"""How a setting is declared, and how the text of its variable becomes a value.

A parser takes the text, stripped and not empty, and returns the value or raises NotAllowed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from msgspec import Struct

from router.core.config import ENDLESS_RETRY, STANDARD_RETRY, DefaultRetry, RetryPolicy
from router.core.config_entry import BadEntry, read_retry
from router.core.redact import MASK, mask_malformed
from router.core.trace import SamplingRule

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
Parser = Callable[[str], T]

_SWITCHES: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_WORKER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", re.ASCII)
_DECIMAL: Final = re.compile(r"\d{1,9}(?:\.\d{0,18})?|\.\d{1,18}", re.ASCII)
_RETRY_EXAMPLE: Final = '{"maxAttempts": 20, "backoff": [10, 60, 300], "statuses": [408, 423]}'
_SIZE_UNITS: Final = {"": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_SIZE: Final = re.compile(r"(\d{1,15}) ?(kib|mib|gib|)", re.ASCII)
_HOST_PATTERN: Final = re.compile(r"[A-Za-z0-9*._:\[\]-]+")
_SHOWN_CHARACTERS: Final = 100


class BadSetting(ValueError):
    """The environment does not make sense. Raised before anything is opened: exit code 2."""


class NotAllowed(ValueError):
    """The text says what the variable may be. It does not repeat what it is: that may be secret."""


class Variable(Struct, frozen=True):
    """One variable of the environment."""

    name: str
    parse: Parser[object]
    default: str  # as it would be written; "" if there is none
    meaning: str
    secret: bool


def env(name: str, parse: Parser[T], default: str, meaning: str, *, secret: bool = False) -> T:
    """Declare a field of a settings dataclass that is read from a variable."""
    return cast("T", _field(Variable(name, parse, default, meaning, secret), parse(default)))


def optional(name: str, parse: Parser[T], meaning: str, *, secret: bool = False) -> T | None:
    """Declare a field that is None if its variable is not set."""
    return cast("T | None", _field(Variable(name, parse, "", meaning, secret), None))


def _field(variable: Variable, default: object) -> Any:
    shown = not variable.secret and not variable.name.endswith("_URL")  # it may hold credentials
    return field(default=default, repr=shown, metadata={"variable": variable})


def variables_of(kind: type[Any]) -> Iterator[Variable]:
    """Iterate over the variables that a settings dataclass declares."""
    for spec in fields(kind):
        if "variable" in spec.metadata:
            yield spec.metadata["variable"]


def read_settings(kind: type[T], given: Mapping[str, str]) -> T:
    """Read a settings dataclass, or raise BadSetting. A blank variable counts as not set."""
    values: dict[str, object] = {}
    for spec in fields(cast("Any", kind)):
        if "variable" in spec.metadata:
            variable = spec.metadata["variable"]
            raw = given.get(variable.name, "").strip()
            try:
                values[spec.name] = variable.parse(raw) if raw else spec.default
            except NotAllowed as error:
                shown = MASK if variable.secret else shown_value(raw)
                raise BadSetting(f"{variable.name} {error}, not {shown}") from None
    return kind(**values)


def shown_value(raw: str) -> str:
    """Shorten a value to one line."""
    return repr(mask_malformed(raw)[:_SHOWN_CHARACTERS])


class AuthMode(Enum):
    NONE = auto()
    BASIC = auto()
    TOKEN = auto()
    OIDC = auto()


class HttpVersion(Enum):
    HTTP_2 = auto()
    HTTP_1_1 = auto()


class BreakerScope(Enum):
    ORIGIN = auto()
    GLOBAL = auto()


class StandbyScope(Enum):
    ROUTER = auto()  # one router works
    QUEUE = auto()  # all do, each on the queues whose leases it has


class TracesExporter(Enum):
    OTLP = auto()
    NONE = auto()


class Sampler(Enum):
    """OpenTelemetry's names: which share of the messages, and whether their publisher decides."""

    ALWAYS_ON = auto()
    ALWAYS_OFF = auto()
    TRACEIDRATIO = auto()
    PARENTBASED_ALWAYS_ON = auto()
    PARENTBASED_ALWAYS_OFF = auto()
    PARENTBASED_TRACEIDRATIO = auto()

    def rule(self, ratio: float) -> SamplingRule:
        share = {"ON": 1.0, "OFF": 0.0}.get(self.name.rpartition("_")[2], ratio)
        return SamplingRule(share, follows_parent=self.name.startswith("PARENTBASED"))


class LogLevel(Enum):
    DEBUG = auto()
    INFO = auto()
    WARNING = auto()
    WARN = WARNING
    ERROR = auto()
    CRITICAL = auto()


class LogFormat(Enum):
    AUTO = auto()  # JSON unless on a terminal
    JSON = auto()
    TEXT = auto()


def text(raw: str) -> str:
    if not raw.isprintable():
        raise NotAllowed("must be printable text")
    return raw


def header_text(raw: str) -> str:
    """Read a text that an HTTP header can hold."""
    if not (raw.isascii() and raw.isprintable()):
        raise NotAllowed("must be printable ASCII")
    return raw


def worker_name(raw: str) -> str:
    """Read a name that goes into the ids of workers, and so into names of files."""
    if not _WORKER_NAME.fullmatch(raw):
        raise NotAllowed("must be 1 to 64 ASCII letters, digits, `.`, `_` or `-`")
    return raw


def directory(raw: str) -> Path:
    return Path(text(raw))


def switch(raw: str) -> bool:
    value = _SWITCHES.get(raw.lower())
    if value is None:
        raise NotAllowed("must be true or false")
    return value


def whole(least: int, most: int) -> Parser[int]:
    def parse(raw: str) -> int:
        if not _WHOLE.fullmatch(raw) or not least <= int(raw) <= most:
            raise NotAllowed(f"must be a whole number from {least} to {most}")
        return int(raw)

    return parse


def share(raw: str) -> float:
    if not _DECIMAL.fullmatch(raw) or float(raw) > 1:
        raise NotAllowed("must be a number from 0 to 1")
    return float(raw)


def seconds(least: float, most: float) -> Parser[float]:
    """Read a duration such as 5m, 30s, 1h, 500ms, or plain seconds."""

    def parse(raw: str) -> float:
        parts = _DURATION.fullmatch(raw.lower())
        value = float(parts[1]) * _UNITS[parts[2]] if parts else -1.0
        if not least <= value <= most:
            limits = f"from {least:g}s to {most:g}s"
            raise NotAllowed(f"must be a duration such as 500ms, 30s, 5m or 1h, {limits}")
        return value

    return parse


def size(least: int, most: int) -> Parser[int]:
    """Read a size such as 500MiB or 2 GiB, or plain bytes."""

    def parse(raw: str) -> int:
        parts = _SIZE.fullmatch(raw.lower())
        value = int(parts[1]) * _SIZE_UNITS[parts[2]] if parts else -1
        if not least <= value <= most:
            limits = f"from {least} to {most} bytes"
            raise NotAllowed(f"must be a size such as 500MiB, 2GiB or plain bytes, {limits}")
        return value

    return parse


def milliseconds(least: int, most: int) -> Parser[float]:
    """Read milliseconds, as seconds: the unit of all our durations."""
    count = whole(least, most)
    return lambda raw: count(raw) / 1000


def choice(options: type[E]) -> Parser[E]:
    def parse(raw: str) -> E:
        option = options.__members__.get(raw.upper())
        if option is None:
            raise NotAllowed(f"must be one of {', '.join(option.name for option in options)}")
        return option

    return parse


def name_among(names: tuple[str, ...]) -> Parser[str]:
    def parse(raw: str) -> str:
        if raw.upper() not in names:
            raise NotAllowed(f"must be one of {', '.join(names)}")
        return raw.upper()

    return parse


def listed(parse_one: Parser[T]) -> Parser[tuple[T, ...]]:
    """Read a comma-separated list."""
    return lambda raw: tuple(parse_one(item.strip()) for item in raw.split(",") if item.strip())


def host_pattern(raw: str) -> str:
    if not _HOST_PATTERN.fullmatch(raw):
        raise NotAllowed("must be host names, with * as a wildcard")
    return raw.lower()


class Claim(NamedTuple):
    """The claims that a token must have."""

    name: str
    value: str


def claim(raw: str) -> Claim:
    name, equals, value = (part.strip() for part in raw.partition("="))
    if not (name and equals and value):
        raise NotAllowed("must be such as name=value")
    return Claim(name, value)


def url(*schemes: str) -> Parser[str]:
    def parse(raw: str) -> str:
        parts = _split(raw)
        if parts is None or parts.scheme not in schemes:
            raise _must_begin_with(schemes)
        is_file = parts.netloc in {"", "localhost"} and parts.path.startswith("/")
        if not (is_file if parts.scheme == "file" else parts.hostname):
            raise _must_begin_with(schemes)
        return raw

    return parse


def servers(*schemes: str) -> Parser[str]:
    """Read a URL that may name several hosts, as those of clusters do."""

    def parse(raw: str) -> str:
        scheme, separator, place = raw.partition("://")
        hosts = place.partition("/")[0].rpartition("@")[2].split(",")
        usable = raw.isprintable() and " " not in raw and all(hosts)
        if not separator or scheme not in schemes or not usable:
            raise _must_begin_with(schemes)
        return raw

    return parse


def sqlite_path(uri: str) -> str:
    """Return the file of a `sqlite:` URI: absolute, after three slashes as after four."""
    return "/" + unquote(urlsplit(uri).path).lstrip("/")


def dead_letter_url(raw: str) -> str:
    if raw.lower() == "none":
        return "none"
    parts = _split(raw)
    if parts is not None and parts.scheme in {"postgresql", "postgres"}:
        return raw
    if parts is None or parts.scheme != "sqlite" or parts.netloc or not sqlite_path(raw).strip("/"):
        raise NotAllowed("must be sqlite:///path, postgresql://host/database or none")
    return raw


def retry_policy(raw: str) -> RetryPolicy:
    """Read JSON, written as `retry` in the routing document."""
    try:
        return read_retry(msgspec.json.decode(raw))
    except BadEntry as bad:
        where = bad.where.removeprefix("retry").strip(".")
        reason = f"{where}: {bad.text}" if where else bad.text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        reason = "not JSON"
    raise NotAllowed(f"must be standard, none or JSON such as {_RETRY_EXAMPLE} ({reason})")


def default_retry(raw: str) -> DefaultRetry:
    """Read `standard`, `none`, or a policy."""
    known = {"standard": STANDARD_RETRY, "none": ENDLESS_RETRY}.get(raw.lower())
    return DefaultRetry.of_all(retry_policy(raw)) if known is None else known


def _split(raw: str) -> SplitResult | None:
    if not raw.isprintable() or " " in raw:
        return None
    try:
        parts = urlsplit(raw)
        _ = parts.port  # raises when it is none
    except ValueError:
        return None
    return parts


def _must_begin_with(schemes: tuple[str, ...]) -> NotAllowed:
    either = " or ".join(f"{scheme}://" for scheme in schemes)
    return NotAllowed(f"must be a URL that begins with {either}")
