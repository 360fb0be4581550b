"""All of the environment we read, in one place, once, at start.

Each field of `Settings` names its variable, how it is read, its default and its meaning; the table
of settings for people is made of the same words. That makes this file long, and all of it a table.
"""
# ruff: noqa: RUF009  (the calls in the class body make dataclass fields)

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from msgspec import Struct

from router.core.config import QueueNaming, QueueType, RetryPolicy, sqlite_path
from router.core.trace import Sampling
from router.core.warnings import Severity
from router.setting_values import (
    AuthMode,
    BreakerScope,
    HttpVersion,
    LogFormat,
    LogLevel,
    NotAllowed,
    Parser,
    Sampler,
    TracesExporter,
    choice,
    dead_letter_url,
    directory,
    header_text,
    host_pattern,
    listed,
    milliseconds,
    retry_policy,
    seconds,
    servers,
    share,
    size,
    switch,
    text,
    url,
    whole,
)

_PREFIX: Final = "MESSAGE_ROUTER_"
_SERVICE_LINKS: Final = ("MESSAGE_ROUTER_SERVICE_", "MESSAGE_ROUTER_PORT_")
_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR
_YEAR: Final = 365 * _DAY
_LEAST_STORE: Final = 2 * 1024**2  # one letter fits, of the largest message
_TIB: Final = 1024**4
_LONGEST_SHOWN: Final = 100
OTLP_HTTP: Final = "http/protobuf"
OTLP_COLLECTOR: Final = "http://localhost:4318"  # where OpenTelemetry expects one

T = TypeVar("T")


class BadSetting(ValueError):
    """The environment does not make sense. Raised before anything is opened: exit code 2."""


class Variable(Struct, frozen=True):
    """One variable of the environment."""

    name: str
    parse: Parser[object]
    default: str  # as it would be written; "": none
    meaning: str
    secret: bool


def _env(name: str, parse: Parser[T], default: str, meaning: str, *, secret: bool = False) -> T:
    return cast("T", _field(Variable(name, parse, default, meaning, secret), parse(default)))


def _optional(name: str, parse: Parser[T], meaning: str, *, secret: bool = False) -> T | None:
    return cast("T | None", _field(Variable(name, parse, "", meaning, secret), None))


def _field(variable: Variable, default: object) -> Any:
    shown = not variable.secret and not variable.name.endswith("_URL")  # it may hold credentials
    return field(default=default, repr=shown, metadata={"variable": variable})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations are in seconds."""

    config_urls: tuple[str, ...] = _env(
        "MESSAGE_ROUTER_CONFIG_URL",
        listed(url("http", "https", "file")),
        "",
        "URLs of the routing configuration, comma-separated; none: embedded queue `default`",
    )
    config_token: str | None = _optional(
        "MESSAGE_ROUTER_CONFIG_TOKEN",
        header_text,
        "sent as a bearer token to the first configuration URL's origin",
        secret=True,
    )
    enabled: bool = _env(
        "MESSAGE_ROUTER_ENABLED",
        switch,
        "true",
        "master switch; `false`: healthy, and consumes nothing",
    )
    queue_type: QueueType | None = _optional(
        "MESSAGE_ROUTER_QUEUE_TYPE",
        choice(QueueType),
        "broker of a `queueUri` without a scheme; none: `SQS` with a config URL, else `EMBEDDED`",
    )
    sync_interval: float = _env(
        "MESSAGE_ROUTER_SYNC_INTERVAL",
        seconds(1, _DAY),
        "5m",
        "time between two configuration syncs",
    )
    config_attempts: int = _env(
        "MESSAGE_ROUTER_CONFIG_ATTEMPTS", whole(1, 1000), "12", "attempts of one sync"
    )
    config_retry_delay: float = _env(
        "MESSAGE_ROUTER_CONFIG_RETRY_DELAY", seconds(0, _HOUR), "5s", "pause between them"
    )
    max_pools: int = _env(
        "MESSAGE_ROUTER_MAX_POOLS",
        whole(1, 1_000_000),
        "10000",
        "no more pools are made than these",
    )
    pool_warning_threshold: int = _env(
        "MESSAGE_ROUTER_POOL_WARNING_THRESHOLD",
        whole(1, 1_000_000),
        "5000",
        "a warning is raised from this many pools on",
    )
    allow_empty_config: bool = _env(
        "MESSAGE_ROUTER_ALLOW_EMPTY_CONFIG",
        switch,
        "false",
        "let a document remove every queue of a running router",
    )
    state_dir: Path = _env(
        "MESSAGE_ROUTER_STATE_DIR",
        directory,
        "./.message-router",
        "embedded queue and dead letters",
    )
    dead_letter_url: str | None = _optional(
        "MESSAGE_ROUTER_DEAD_LETTER_URL",
        dead_letter_url,
        "`sqlite:///path`, or `none` to drop them; none given: SQLite in the state directory",
    )
    dead_letter_retention: float | None = _optional(
        "MESSAGE_ROUTER_DEAD_LETTER_RETENTION",
        seconds(60, 10 * _YEAR),
        "dead letters are removed when they are older than this, such as `720h`; none: never",
    )
    dead_letter_max_bytes: int = _env(
        "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES",
        size(_LEAST_STORE, _TIB),
        "1GiB",
        "size at which the dead-letter store is full: bytes, or with `KiB`, `MiB`, `GiB`",
    )
    host: str = _env("MESSAGE_ROUTER_HOST", text, "127.0.0.1", "address of the API")
    port: int = _env(
        "MESSAGE_ROUTER_PORT", whole(0, 65535), "8080", "port of the API; 0: a free one"
    )
    api_max_connections: int = _env(
        "MESSAGE_ROUTER_API_MAX_CONNECTIONS",
        whole(1, 100_000),
        "200",
        "open connections of the API; at most a quarter of the open files that the system allows",
    )
    auth_mode: AuthMode = _env(
        "MESSAGE_ROUTER_AUTH_MODE",
        choice(AuthMode),
        "NONE",
        "who may use the API: `NONE`, `BASIC`, `TOKEN`, `OIDC`",
    )
    basic_username: str | None = _optional("AUTH_BASIC_USERNAME", text, "for auth mode `BASIC`")
    basic_password: str | None = _optional(
        "AUTH_BASIC_PASSWORD", text, "for auth mode `BASIC`", secret=True
    )
    api_token: str | None = _optional(
        "MESSAGE_ROUTER_API_TOKEN", header_text, "for auth mode `TOKEN`", secret=True
    )
    log_level: LogLevel = _env(
        "MESSAGE_ROUTER_LOG_LEVEL",
        choice(LogLevel),
        "INFO",
        "`DEBUG`, `INFO`, `WARNING`, `ERROR`, `CRITICAL`",
    )
    log_format: LogFormat = _env(
        "MESSAGE_ROUTER_LOG_FORMAT",
        choice(LogFormat),
        "auto",
        "`json`, `text`; `auto`: JSON unless on a terminal",
    )
    shutdown_timeout: float = _env(
        "MESSAGE_ROUTER_SHUTDOWN_TIMEOUT",
        seconds(0, _HOUR),
        "30s",
        "time for open deliveries to finish",
    )
    sqs_max_messages: int = _env(
        "MESSAGE_ROUTER_SQS_MAX_MESSAGES_PER_POLL",
        whole(1, 10),
        "10",
        "messages of one SQS receive",
    )
    sqs_wait: float = _env(
        "MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS", seconds(0, 20), "20", "long poll of SQS"
    )
    sqs_endpoint: str | None = _optional(
        "SQS_ENDPOINT_OVERRIDE", url("http", "https"), "a stand-in for SQS", secret=True
    )
    aws_region: str = _env("AWS_REGION", text, "eu-west-1", "region of SQS")
    activemq_url: str = _env(
        "ACTIVEMQ_BROKER_URL",
        url("stomp", "activemq"),
        "stomp://localhost:61613",
        "ActiveMQ broker",
        secret=True,
    )
    activemq_username: str = _env("ACTIVEMQ_USERNAME", text, "admin", "ActiveMQ user")
    activemq_password: str = _env(
        "ACTIVEMQ_PASSWORD", text, "admin", "ActiveMQ password", secret=True
    )
    nats_servers: tuple[str, ...] = _env(
        "NATS_SERVERS",
        listed(url("nats", "tls")),
        "nats://localhost:4222",
        "NATS servers, comma-separated",
        secret=True,
    )
    nats_username: str | None = _optional("NATS_USERNAME", text, "NATS user")
    nats_password: str | None = _optional("NATS_PASSWORD", text, "NATS password", secret=True)
    nats_stream: str = _env("NATS_STREAM_NAME", text, "MESSAGES", "JetStream stream")
    nats_consumer: str = _env(
        "NATS_CONSUMER_NAME", text, "message-router", "JetStream durable consumer"
    )
    rabbitmq_url: str = _env(
        "RABBITMQ_URL",
        url("amqp", "amqps"),
        "amqp://guest:guest@localhost/",
        "RabbitMQ broker",
        secret=True,
    )
    mediator_timeout: float = _env(
        "MEDIATOR_HTTP_TIMEOUT_MS",
        milliseconds(1, 86_400_000),
        "900000",
        "time for one delivery, in milliseconds",
    )
    mediator_http_version: HttpVersion = _env(
        "MEDIATOR_HTTP_VERSION",
        choice(HttpVersion),
        "HTTP_2",
        "`HTTP_2` where the target offers it, or `HTTP_1_1`",
    )
    breaker_scope: BreakerScope = _env(
        "MEDIATOR_BREAKER_SCOPE",
        choice(BreakerScope),
        "origin",
        "one circuit breaker per target `origin`, or one `global` one",
    )
    allowed_hosts: tuple[str, ...] = _env(
        "MEDIATOR_ALLOWED_HOSTS",
        listed(host_pattern),
        "",
        "host patterns that may be delivered to, comma-separated; none: any",
    )
    block_private: bool = _env(
        "MEDIATOR_BLOCK_PRIVATE", switch, "false", "refuse loopback and private targets too"
    )
    proxy: str | None = _optional(
        "MEDIATOR_PROXY",
        url("http", "https", "socks5", "socks5h"),
        "proxy for deliveries",
        secret=True,
    )
    dedup_window: float = _env(
        "MESSAGE_ROUTER_DEDUP_WINDOW",
        seconds(0, _DAY),
        "5m",
        "work queues: how long a finished id is remembered",
    )
    default_retry: RetryPolicy | None = _optional(
        "MESSAGE_ROUTER_DEFAULT_RETRY",
        retry_policy,
        'retry policy of pools and queues without one, such as `{"maxAttempts": 20}`; '
        "none: for ever, every 30 s",
    )
    standby_enabled: bool = _env(
        "STANDBY_ENABLED", switch, "false", "several routers, one of them works at a time"
    )
    standby_lock_url: str | None = _optional(
        "STANDBY_LOCK_URL",
        servers("redis", "rediss", "postgresql", "nats"),
        "where the leader lock is: `redis://`, `postgresql://`, `nats://`",
        secret=True,
    )
    standby_lock_key: str = _env(
        "STANDBY_LOCK_KEY", text, "message-router-primary-lock", "name of the leader lock"
    )
    standby_lock_ttl: float = _env(
        "STANDBY_LOCK_TTL",
        seconds(1, _HOUR),
        "30s",
        "how long the leader lock lasts without being refreshed",
    )
    standby_instance_id: str | None = _optional(
        "STANDBY_INSTANCE_ID",
        text,
        "name of this router, in `/monitoring/standby-status`; none: the host's",
    )
    oidc_issuer: str | None = _optional(
        "OIDC_ISSUER",
        url("http", "https"),
        "for auth mode `OIDC`: the provider, as it calls itself",
    )
    oidc_audience: str | None = _optional(
        "OIDC_AUDIENCE", text, "for auth mode `OIDC`: whom tokens are for"
    )
    notify_webhook_url: str | None = _optional(
        "NOTIFY_WEBHOOK_URL", url("http", "https"), "where notifications go as JSON", secret=True
    )
    notify_slack_url: str | None = _optional(
        "NOTIFY_SLACK_URL", url("http", "https"), "incoming webhook of Slack", secret=True
    )
    notify_teams_url: str | None = _optional(
        "NOTIFY_TEAMS_URL",
        url("http", "https"),
        "incoming webhook of a Teams workflow",
        secret=True,
    )
    notify_smtp_url: str | None = _optional(
        "NOTIFY_SMTP_URL",
        url("smtp", "smtps"),
        "mail server, such as `smtp://user:password@host:587?from=router@example.com`",
        secret=True,
    )
    notify_email_to: tuple[str, ...] = _env(
        "NOTIFY_EMAIL_TO", listed(text), "", "who gets mail, comma-separated"
    )
    notify_min_severity: Severity = _env(
        "NOTIFY_MIN_SEVERITY",
        choice(Severity),
        "WARN",
        "least severity that is notified of: `INFO`, `WARN`, `ERROR`, `CRITICAL`",
    )
    notify_batch_interval: float = _env(
        "NOTIFY_BATCH_INTERVAL",
        seconds(1, _DAY),
        "5m",
        "notifications are gathered for this long",
    )

    otel_disabled: bool = _env(
        "OTEL_SDK_DISABLED", switch, "false", "`true`: no traces, whatever else is set"
    )
    traces_exporter: TracesExporter | None = _optional(
        "OTEL_TRACES_EXPORTER",
        choice(TracesExporter),
        "`otlp` or `none`; none given: `otlp` if an endpoint is set",
    )
    otlp_endpoint: str | None = _optional(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        url("http", "https"),
        "where traces go; `/v1/traces` is added to it",
        secret=True,
    )
    otlp_traces_endpoint: str | None = _optional(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        url("http", "https"),
        "the same, taken as it is",
        secret=True,
    )
    otlp_protocol: str = _env(
        "OTEL_EXPORTER_OTLP_PROTOCOL", text, OTLP_HTTP, "how they go there; no other is spoken"
    )
    otlp_traces_protocol: str | None = _optional(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", text, "the same, and goes before it"
    )
    traces_sampler: Sampler = _env(
        "OTEL_TRACES_SAMPLER",
        choice(Sampler),
        "parentbased_always_on",
        "which messages are traced: `always_on`, `always_off`, `traceidratio`, and each with "
        "`parentbased_` before it: what carries a trace is traced if its publisher was",
    )
    traces_ratio: float = _env(
        "OTEL_TRACES_SAMPLER_ARG", share, "1.0", "the share that `traceidratio` takes"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read them all, or raise BadSetting. A blank variable counts as not set."""
        given = {name: raw.strip() for name, raw in env.items() if not _is_service_link(name, raw)}
        values: dict[str, Any] = {
            spec.name: _read(variable, given.get(variable.name, ""), spec.default)
            for spec, variable in _variables()
        }
        return cls(**values)

    def __post_init__(self) -> None:
        """Check what one variable alone cannot tell."""
        if self.standby_enabled and self.standby_lock_url is None:
            raise BadSetting("STANDBY_LOCK_URL must be set when STANDBY_ENABLED is true")
        mode = self.auth_mode.name
        for name, value in self._credentials().items():
            if value is None:
                raise BadSetting(f"{name} must be set when MESSAGE_ROUTER_AUTH_MODE is {mode}")
        if (self.notify_smtp_url is None) != (not self.notify_email_to):
            raise BadSetting("NOTIFY_SMTP_URL and NOTIFY_EMAIL_TO go together: set both or none")
        protocol = self.otlp_traces_protocol or self.otlp_protocol
        if self.traces_endpoint is not None and protocol != OTLP_HTTP:
            raise BadSetting(
                f"OTEL_EXPORTER_OTLP_PROTOCOL must be {OTLP_HTTP}, not {_shown(protocol)}; "
                "OTEL_TRACES_EXPORTER=none turns traces off"
            )

    @property
    def naming(self) -> QueueNaming:
        by_default = QueueType.SQS if self.config_urls else QueueType.EMBEDDED
        return QueueNaming(self.queue_type or by_default, str(self.state_dir.absolute()))

    @property
    def dead_letter_path(self) -> Path | None:
        """None: dead letters are dropped."""
        if self.dead_letter_url is None:
            return self.state_dir.absolute() / "dead-letters.db"
        return None if self.dead_letter_url == "none" else Path(sqlite_path(self.dead_letter_url))

    @property
    def traces_endpoint(self) -> str | None:
        """None: there are no traces."""
        if self.otel_disabled or self.traces_exporter is TracesExporter.NONE:
            return None
        if self.otlp_traces_endpoint is not None:
            return self.otlp_traces_endpoint
        if self.otlp_endpoint is None and self.traces_exporter is None:
            return None
        return f"{(self.otlp_endpoint or OTLP_COLLECTOR).rstrip('/')}/v1/traces"

    @property
    def sampling(self) -> Sampling:
        return self.traces_sampler.rule(self.traces_ratio)

    def _credentials(self) -> Mapping[str, str | None]:
        """What the auth mode needs, by variable."""
        match self.auth_mode:
            case AuthMode.BASIC:
                return {
                    "AUTH_BASIC_USERNAME": self.basic_username,
                    "AUTH_BASIC_PASSWORD": self.basic_password,
                }
            case AuthMode.TOKEN:
                return {"MESSAGE_ROUTER_API_TOKEN": self.api_token}
            case AuthMode.OIDC:
                return {"OIDC_ISSUER": self.oidc_issuer, "OIDC_AUDIENCE": self.oidc_audience}
            case _:
                return {}


def setting_notes(env: Mapping[str, str]) -> list[str]:
    """What is set to no effect, for a warning at start."""
    known = [variable.name for _, variable in _variables()]
    unknown = sorted(
        name
        for name, raw in env.items()
        if name.startswith(_PREFIX) and name not in known and not _is_service_link(name, raw)
    )
    return [f"{name} is not a setting{_guess(name, known)}" for name in unknown]


def settings_table() -> str:
    """All variables, for the README."""
    rows = [_row(variable) for _, variable in _variables()]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows, ""])


def _row(variable: Variable) -> str:
    default = f"`{variable.default}`" if variable.default else "none"
    return f"| `{variable.name}` | {default} | {variable.meaning} |"


def _variables() -> Iterator[tuple[Field[Any], Variable]]:
    return ((spec, spec.metadata["variable"]) for spec in fields(Settings))


def _read(variable: Variable, raw: str, default: object) -> object:
    if not raw:
        return default
    try:
        return variable.parse(raw)
    except NotAllowed as error:
        shown = "***" if variable.secret else _shown(raw)
        raise BadSetting(f"{variable.name} {error}, not {shown}") from None


def _shown(raw: str) -> str:
    """One short line, without the places where even a malformed URL may hold a credential."""
    before, at, after = raw.rpartition("@")
    public = f"***{at}{after}" if before else raw
    return repr(public.partition("?")[0][:_LONGEST_SHOWN])


def _guess(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.8)  # the common prefix alone gives 0.75
    return f": did you mean {close[0]}?" if close else ""


def _is_service_link(name: str, raw: str) -> bool:
    """Whether Kubernetes set it, which it does beside a Service called message-router."""
    return name.startswith(_SERVICE_LINKS) or (name == "MESSAGE_ROUTER_PORT" and "://" in raw)
