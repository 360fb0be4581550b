"""All of the environment that the router reads, in one place, once, at start.

Each field names its variable, how it is read, its default and its meaning. The settings table of
the documentation is made from the same words. Each broker's settings are declared in its package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Self

import msgspec

from router.brokers.catalog import QUEUE_TYPES, broker_variables, installed, read_broker_settings
from router.brokers.workers import BrokerSettings
from router.core.broker import QueueNames
from router.core.config import DefaultRetry
from router.core.config_entry import KEYS
from router.core.trace import SamplingRule
from router.core.typos import shown_name
from router.core.warnings import Severity
from router.setting_values import (
    AuthMode,
    BadSetting,
    BreakerScope,
    Claim,
    HttpVersion,
    LogFormat,
    LogLevel,
    Sampler,
    StandbyScope,
    TracesExporter,
    Variable,
    choice,
    claim,
    dead_letter_url,
    default_retry,
    directory,
    env,
    header_text,
    host_pattern,
    listed,
    milliseconds,
    name_among,
    optional,
    read_settings,
    seconds,
    servers,
    share,
    shown_value,
    size,
    sqlite_path,
    switch,
    text,
    url,
    whole,
    worker_name,
)

_PREFIX: Final = "MESSAGE_ROUTER_"
_SERVICE_LINKS: Final = ("MESSAGE_ROUTER_SERVICE_", "MESSAGE_ROUTER_PORT_")
_HOUR: Final = 3600.0
_DAY_SECONDS: Final = 24 * _HOUR
_YEAR_SECONDS: Final = 365 * _DAY_SECONDS
_MIN_STORE_BYTES: Final = 2 * 1024**2  # one dead letter of the largest size fits
_TIB: Final = 1024**4
MIN_POLL: Final = 0.01  # seconds
MAX_POLL: Final = 60
OTLP_HTTP: Final = "http/protobuf"
OTLP_COLLECTOR: Final = "http://localhost:4318"  # where OpenTelemetry expects it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations are in seconds."""

    # A table: two lines each.
    # fmt: off
    config_urls: tuple[str, ...] = env(
        "MESSAGE_ROUTER_CONFIG_URL", listed(url("http", "https", "file")), "",
        "URLs of the routing configuration, comma-separated; if not set: embedded queue `default`")
    config_token: str | None = optional("MESSAGE_ROUTER_CONFIG_TOKEN", header_text,
        "bearer token for the origin of the first configuration URL", secret=True)
    enabled: bool = env("MESSAGE_ROUTER_ENABLED", switch, "true",
        "`false`: the router is healthy but consumes nothing")
    queue_type: str | None = optional("MESSAGE_ROUTER_QUEUE_TYPE", name_among((*QUEUE_TYPES,)),
        "broker of a `queueUri` without a scheme; if not set: `SQS` with a config URL, otherwise "
        "`EMBEDDED`")
    sync_interval: float = env("MESSAGE_ROUTER_SYNC_INTERVAL", seconds(1, _DAY_SECONDS), "5m",
        "time between two configuration syncs")
    config_attempts: int = env("MESSAGE_ROUTER_CONFIG_ATTEMPTS", whole(1, 1000), "12",
        "attempts per sync")
    config_retry_delay: float = env("MESSAGE_ROUTER_CONFIG_RETRY_DELAY", seconds(0, _HOUR), "5s",
        "pause between two attempts of a sync")
    worker_id: str | None = optional("MESSAGE_ROUTER_WORKER_ID", worker_name,
        "name of this router in `workerId` of messages, before a part that no other process has; "
        "if not set: the host name")
    poll_interval: float | None = optional(
        "MESSAGE_ROUTER_POLL_INTERVAL", seconds(MIN_POLL, MAX_POLL),
        "longest pause between two looks into an idle queue on SQLite, PostgreSQL or PGMQ that "
        "no notification announces; if not set: 80 ms on SQLite, else 1 s")
    look_ahead_bytes: int = env(
        "MESSAGE_ROUTER_LOOK_AHEAD_BYTES", size(1024**2, _TIB), "128MiB",
        "maximum size of all messages together that are held while their pool is full")
    max_pools: int = env("MESSAGE_ROUTER_MAX_POOLS", whole(1, 1_000_000), "10000",
        "maximum number of pools")
    pool_warning_threshold: int = env(
        "MESSAGE_ROUTER_POOL_WARNING_THRESHOLD", whole(1, 1_000_000), "5000",
        "a warning is raised when there are this many pools")
    max_connections: int = env("MESSAGE_ROUTER_MAX_CONNECTIONS", whole(1, 1_000_000), "1000",
        "limit on the sum of `connections` over all queues")
    allow_empty_config: bool = env("MESSAGE_ROUTER_ALLOW_EMPTY_CONFIG", switch, "false",
        "allow a document to remove every queue of a running router")
    state_dir: Path = env("MESSAGE_ROUTER_STATE_DIR", directory, "./.message-router",
        "directory of the embedded queue, the dead letters and the order store")
    dead_letter_url: str | None = optional("MESSAGE_ROUTER_DEAD_LETTER_URL", dead_letter_url,
        "dead-letter store: `sqlite:///path`, `postgresql://…` (shared by replicas), or `none` to "
        "drop dead letters; if not set: a file in the state directory")
    dead_letter_retention: float | None = optional(
        "MESSAGE_ROUTER_DEAD_LETTER_RETENTION", seconds(60, 10 * _YEAR_SECONDS),
        "age at which dead letters are removed, such as `720h`; if not set: never")
    dead_letter_max_bytes: int = env(
        "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", size(_MIN_STORE_BYTES, _TIB), "1GiB",
        "size at which the dead-letter store is full, in bytes or with `KiB`, `MiB`, `GiB`")
    host: str = env("MESSAGE_ROUTER_HOST", text, "127.0.0.1",
        "address of the API")
    port: int = env("MESSAGE_ROUTER_PORT", whole(0, 65535), "8080",
        "port of the API; 0 picks a free one")
    api_max_connections: int = env("MESSAGE_ROUTER_API_MAX_CONNECTIONS", whole(1, 100_000), "200",
        "limit of open connections to the API; at most a quarter of the open files that the system "
        "allows")
    auth_mode: AuthMode = env("MESSAGE_ROUTER_AUTH_MODE", choice(AuthMode), "NONE",
        "authentication of the API: `NONE`, `BASIC`, `TOKEN`, `OIDC`")
    basic_username: str | None = optional("AUTH_BASIC_USERNAME", text,
        "user name for auth mode `BASIC`")
    basic_password: str | None = optional("AUTH_BASIC_PASSWORD", text,
        "password for auth mode `BASIC`", secret=True)
    api_token: str | None = optional("MESSAGE_ROUTER_API_TOKEN", header_text,
        "token for auth mode `TOKEN`", secret=True)
    log_level: LogLevel = env("MESSAGE_ROUTER_LOG_LEVEL", choice(LogLevel), "INFO",
        "`DEBUG`, `INFO`, `WARNING`, `ERROR`, `CRITICAL`")
    log_format: LogFormat = env("MESSAGE_ROUTER_LOG_FORMAT", choice(LogFormat), "auto",
        "`json`, `text` or `auto`: text on a terminal, else JSON")
    shutdown_timeout: float = env("MESSAGE_ROUTER_SHUTDOWN_TIMEOUT", seconds(0, _HOUR), "30s",
        "how long a shutdown waits for open deliveries")
    # Each package declares its own.
    brokers: BrokerSettings = field(default=BrokerSettings(), repr=False, compare=False)
    mediator_timeout: float = env("MEDIATOR_HTTP_TIMEOUT_MS", milliseconds(1, 86_400_000), "900000",
        "timeout of one request, in milliseconds")
    mediator_http_version: HttpVersion = env("MEDIATOR_HTTP_VERSION", choice(HttpVersion), "HTTP_2",
        "`HTTP_2` where the target offers it, or `HTTP_1_1`")
    breaker_scope: BreakerScope = env("MEDIATOR_BREAKER_SCOPE", choice(BreakerScope), "origin",
        "one circuit breaker per target `origin`, or a single `global` one")
    allowed_hosts: tuple[str, ...] = env("MEDIATOR_ALLOWED_HOSTS", listed(host_pattern), "",
        "host patterns of allowed targets, comma-separated; if not set: any host")
    block_private: bool = env("MEDIATOR_BLOCK_PRIVATE", switch, "false",
        "also refuse targets on loopback and in private networks")
    proxy: str | None = optional("MEDIATOR_PROXY", url("http", "https", "socks5", "socks5h"),
        "proxy for deliveries. It connects to the targets, so the router does not check the "
        "addresses that their names stand for", secret=True)
    credentials_file: Path | None = optional("MESSAGE_ROUTER_CREDENTIALS_FILE", directory,
        "file with the router's own credentials for targets, and the hosts that they may go to; if "
        "not set: none")
    executors_file: Path | None = optional("MEDIATOR_EXECUTORS_FILE", directory,
        "file that defines which processes messages may run; if not set: none")
    dedup_window: float = env("MESSAGE_ROUTER_DEDUP_WINDOW", seconds(0, _DAY_SECONDS), "5m",
        "work queues, PGMQ: how long duplicates of a finished message are recognized")
    result_retention: float = env(
        "MESSAGE_ROUTER_RESULT_RETENTION", seconds(0, _YEAR_SECONDS), "24h",
        "work queues, PGMQ: how long what ended with a payload, reply, step or batch is kept")
    result_max_bytes: int = env(
        "MESSAGE_ROUTER_RESULT_MAX_BYTES", size(_MIN_STORE_BYTES, _TIB), "1GiB",
        "work queues: limit of all results that one database keeps; the oldest are dropped first")
    order_store: str | None = optional("MESSAGE_ROUTER_ORDER_STORE", servers("postgresql"),
        "strict queues: `postgresql://` URL of the order store; if not set: `order.db` in the "
        "state directory", secret=True)
    order_store_max_bytes: int = env(
        "MESSAGE_ROUTER_ORDER_STORE_MAX_BYTES", size(_MIN_STORE_BYTES, _TIB), "1GiB",
        "strict queues: limit of what the order store keeps of one queue. At the limit, the queue "
        "waits")
    default_retry: DefaultRetry = env("MESSAGE_ROUTER_DEFAULT_RETRY", default_retry, "standard",
        'retry policy of pools and queues without one, such as `{"maxAttempts": 20}`. `standard`: '
        "commands and tasks 4 attempts with 10, 60 and 300 s between them, other messages every "
        "30 s until they have failed 50 times and for 24 h. `none`: every 30 s without end")
    limits_url: str | None = optional(
        "MESSAGE_ROUTER_LIMITS_URL", servers("redis", "rediss", "postgresql"),
        "`redis://` or `postgresql://` URL of the server over which routers share the rate limits "
        "of pools; if not set: the server of `STANDBY_LOCK_URL` with `STANDBY_SCOPE=queue`, unless "
        "that is NATS; else each router has its own", secret=True)
    limits_key: str | None = optional("MESSAGE_ROUTER_LIMITS_KEY", text,
        "name of the limits on that server: routers with the same one share them; if not set: "
        "`STANDBY_LOCK_KEY`")
    replicas: int = env("MESSAGE_ROUTER_REPLICAS", whole(1, 1000), "1",
        "number of routers that work at the same time. Each takes its share of the concurrency and "
        "rate limits, rates of pools only if there is no limits server")
    standby_enabled: bool = env("STANDBY_ENABLED", switch, "false",
        "hot standby: only one of several routers works at a time")
    standby_scope: StandbyScope = env("STANDBY_SCOPE", choice(StandbyScope), "router",
        "hot standby: `router`: one router works, the others wait; `queue`: all work, each on the "
        "queues whose leases it holds")
    standby_lock_url: str | None = optional(
        "STANDBY_LOCK_URL", servers("redis", "rediss", "postgresql", "nats"),
        "URL of the leader lock: `redis://`, `postgresql://` or `nats://`", secret=True)
    standby_lock_key: str = env("STANDBY_LOCK_KEY", text, "message-router-primary-lock",
        "name of the leader lock")
    standby_lock_ttl: float = env("STANDBY_LOCK_TTL", seconds(1, _HOUR), "30s",
        "how long the leader lock is valid after a refresh")
    standby_instance_id: str | None = optional("STANDBY_INSTANCE_ID", text,
        "name of this router in `/monitoring/standby-status`; if not set: the host name")
    oidc_issuer: str | None = optional("OIDC_ISSUER", url("http", "https"),
        "for auth mode `OIDC`: the provider's issuer URL, exactly as in its tokens")
    oidc_audience: str | None = optional("OIDC_AUDIENCE", text,
        "for auth mode `OIDC`: the audience that tokens must name")
    oidc_required_claims: tuple[Claim, ...] = env("OIDC_REQUIRED_CLAIMS", listed(claim), "",
        "for auth mode `OIDC`: claims that tokens must have, such as `groups=ops`, comma-separated")
    oidc_admin_claim: Claim | None = optional("OIDC_ADMIN_CLAIM", claim,
        "for auth mode `OIDC`: the claim that changes and payloads need; if not set: "
        "they need no claim")
    notify_webhook_url: str | None = optional("NOTIFY_WEBHOOK_URL", url("http", "https"),
        "URL that notifications are sent to as JSON", secret=True)
    notify_slack_url: str | None = optional("NOTIFY_SLACK_URL", url("http", "https"),
        "incoming webhook of a Slack channel", secret=True)
    notify_teams_url: str | None = optional("NOTIFY_TEAMS_URL", url("http", "https"),
        "incoming webhook of a Teams workflow", secret=True)
    notify_smtp_url: str | None = optional("NOTIFY_SMTP_URL", url("smtp", "smtps"),
        "mail server, such as `smtp://user:password@host:587?from=router@example.com`", secret=True)
    notify_email_to: tuple[str, ...] = env("NOTIFY_EMAIL_TO", listed(text), "",
        "recipients of notifications by mail, comma-separated")
    notify_min_severity: Severity = env("NOTIFY_MIN_SEVERITY", choice(Severity), "WARN",
        "lowest severity that is notified: `INFO`, `WARN`, `ERROR`, `CRITICAL`")
    notify_batch_interval: float = env("NOTIFY_BATCH_INTERVAL", seconds(1, _DAY_SECONDS), "5m",
        "how long notifications are collected before they are sent")
    otel_disabled: bool = env("OTEL_SDK_DISABLED", switch, "false",
        "`true` turns traces off")
    traces_exporter: TracesExporter | None = optional(
        "OTEL_TRACES_EXPORTER", choice(TracesExporter),
        "`otlp` or `none`; if not set: `otlp` if there is an endpoint")
    otlp_endpoint: str | None = optional("OTEL_EXPORTER_OTLP_ENDPOINT", url("http", "https"),
        "endpoint for traces; `/v1/traces` is appended", secret=True)
    otlp_traces_endpoint: str | None = optional(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url("http", "https"),
        "full URL for traces; overrides `OTEL_EXPORTER_OTLP_ENDPOINT`", secret=True)
    otlp_protocol: str = env("OTEL_EXPORTER_OTLP_PROTOCOL", text, OTLP_HTTP,
        "protocol for traces; no other is supported")
    otlp_traces_protocol: str | None = optional("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", text,
        "protocol for traces; overrides `OTEL_EXPORTER_OTLP_PROTOCOL`")
    traces_sampler: Sampler = env("OTEL_TRACES_SAMPLER", choice(Sampler), "parentbased_always_on",
        "which messages are traced: `always_on`, `always_off`, `traceidratio`; with the prefix "
        "`parentbased_`, a message that carries a trace is traced if its publisher was")
    traces_ratio: float = env("OTEL_TRACES_SAMPLER_ARG", share, "1.0",
        "share of messages that `traceidratio` traces")
    # fmt: on

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read all settings, or raise BadSetting. A blank variable counts as not set."""
        installed()  # raises if two packages claim the same kind of queue
        given = {name: raw.strip() for name, raw in env.items() if not _is_service_link(name, raw)}
        return replace(read_settings(cls, given), brokers=read_broker_settings(given))

    def __post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.standby_enabled and self.standby_lock_url is None:
            raise BadSetting("STANDBY_LOCK_URL must be set when STANDBY_ENABLED is true")
        for name, mode, value in (
            ("AUTH_BASIC_USERNAME", AuthMode.BASIC, self.basic_username),
            ("AUTH_BASIC_PASSWORD", AuthMode.BASIC, self.basic_password),
            ("MESSAGE_ROUTER_API_TOKEN", AuthMode.TOKEN, self.api_token),
            ("OIDC_ISSUER", AuthMode.OIDC, self.oidc_issuer),
            ("OIDC_AUDIENCE", AuthMode.OIDC, self.oidc_audience),
        ):
            if self.auth_mode is mode and value is None:
                raise BadSetting(f"{name} must be set when MESSAGE_ROUTER_AUTH_MODE is {mode.name}")
        if (self.notify_smtp_url is None) != (not self.notify_email_to):
            raise BadSetting("NOTIFY_SMTP_URL and NOTIFY_EMAIL_TO go together: set both or none")
        protocol = self.otlp_traces_protocol or self.otlp_protocol
        if self.traces_endpoint is not None and protocol != OTLP_HTTP:
            raise BadSetting(
                f"OTEL_EXPORTER_OTLP_PROTOCOL must be {OTLP_HTTP}, not {shown_value(protocol)}; "
                "OTEL_TRACES_EXPORTER=none turns traces off"
            )

    @property
    def naming(self) -> QueueNames:
        by_default = "SQS" if self.config_urls else "EMBEDDED"
        return installed().naming(
            self.queue_type or by_default,
            str(self.state_dir.absolute()),
            has_shared_store=self.order_store is not None,
            locks_queues=self.standby_enabled,
        )

    @property
    def limit_sharers(self) -> int:
        """By how many routers the limits of the configuration are divided (LIM-2)."""
        return 1 if self.is_hot_standby else self.replicas

    @property
    def leases_queues(self) -> bool:
        """Whether several routers work, each on the queues whose leases it has (CFG-10)."""
        return self.standby_enabled and self.standby_scope is StandbyScope.QUEUE

    @property
    def is_hot_standby(self) -> bool:
        """Whether one router works at a time (CFG-9)."""
        return self.standby_enabled and not self.leases_queues

    @property
    def limits_server(self) -> str | None:
        """The URL of the server over which routers share limits: that of the leases, if it can."""
        if self.limits_url is None and self.leases_queues:
            lock_url = self.standby_lock_url or ""
            return None if lock_url.startswith("nats:") else lock_url
        return self.limits_url

    def notes(self) -> list[str]:
        """Return which settings have no effect beside others, for warnings at start."""
        notes = []
        if self.replicas > 1 and self.is_hot_standby:
            notes.append(
                "MESSAGE_ROUTER_REPLICAS is ignored: with STANDBY_ENABLED one router works"
            )
        if self.standby_scope is StandbyScope.QUEUE and not self.standby_enabled:
            notes.append("STANDBY_SCOPE has no effect without STANDBY_ENABLED")
        return notes

    @property
    def dead_letter_path(self) -> Path | None:
        """The file of the dead letters; None if they are in none."""
        if self.dead_letter_url is None:
            return self.state_dir.absolute() / "dead-letters.db"
        is_file = self.dead_letter_url.startswith("sqlite:")
        return Path(sqlite_path(self.dead_letter_url)) if is_file else None

    @property
    def traces_endpoint(self) -> str | None:
        """Where traces go; None if there are none."""
        if self.otel_disabled or self.traces_exporter is TracesExporter.NONE:
            return None
        if self.otlp_traces_endpoint is not None:
            return self.otlp_traces_endpoint
        if self.otlp_endpoint is None and self.traces_exporter is None:
            return None
        return f"{(self.otlp_endpoint or OTLP_COLLECTOR).rstrip('/')}/v1/traces"

    @property
    def sampling(self) -> SamplingRule:
        return self.traces_sampler.rule(self.traces_ratio)


def setting_notes(env: Mapping[str, str]) -> list[str]:
    """Return which variables have no effect, for warnings at start."""
    known = [variable.name for variable in variables()]
    unknown = sorted(
        name
        for name, raw in env.items()
        if name.startswith(_PREFIX) and name not in known and not _is_service_link(name, raw)
    )
    notes = []
    for name in unknown:
        close = get_close_matches(name, known, n=1, cutoff=0.8)  # the prefix alone gives 0.75
        notes.append(f"{name} is not a setting" + (f": did you mean {close[0]}?" if close else ""))
    return [*notes, *_retry_notes(env.get("MESSAGE_ROUTER_DEFAULT_RETRY", ""))]


def _retry_notes(raw: str) -> Iterator[str]:
    """Name what a policy has that no policy has. Without a limit it would be tried for ever."""
    policy = msgspec.json.decode(raw) if raw.lstrip().startswith("{") else {}
    for key in sorted(policy.keys() - KEYS["retry"]):
        close = get_close_matches(key, KEYS["retry"], n=1)
        advice = f": did you mean {close[0]}?" if close else ""
        yield f"MESSAGE_ROUTER_DEFAULT_RETRY: {shown_name(key)} is ignored{advice}"


def settings_table() -> str:
    """Return all variables as a Markdown table, for the documentation."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in variables():
        default = f"`{variable.default}`" if variable.default else "none"
        rows.append(f"| `{variable.name}` | {default} | {variable.meaning} |")
    return "\n".join([*rows, ""])


def variables() -> Iterator[Variable]:
    """Iterate over all variables; those of brokers come where `brokers` is."""
    for spec in fields(Settings):
        if spec.name == "brokers":
            yield from broker_variables()
        else:
            yield spec.metadata["variable"]


def _is_service_link(name: str, raw: str) -> bool:
    """Return whether Kubernetes set it, as it does beside a Service called message-router."""
    return name.startswith(_SERVICE_LINKS) or (name == "MESSAGE_ROUTER_PORT" and "://" in raw)
