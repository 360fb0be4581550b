from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.sqs import SqsSettings
from router.core.config import ENDLESS_RETRY, STANDARD_RETRY, DefaultRetry, RetryPolicy
from router.core.trace import SamplingRule
from router.core.warnings import Severity
from router.setting_values import (
    AuthMode,
    BadSetting,
    BreakerScope,
    HttpVersion,
    LogFormat,
    LogLevel,
    NotAllowed,
    seconds,
    size,
)
from router.settings import Settings, setting_notes, settings_table, variables


def refusal(name: str, value: str) -> str:
    with pytest.raises(BadSetting) as caught:
        Settings.from_env({name: value})
    return str(caught.value)


@pytest.mark.rule("CFG-1")
def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = Settings.from_env({})

    assert settings == Settings()
    assert settings.config_urls == ()
    assert settings.enabled
    assert (settings.sync_interval, settings.config_attempts) == (300, 12)
    assert (settings.config_retry_delay, settings.shutdown_timeout) == (5, 30)
    assert (settings.max_pools, settings.pool_warning_threshold) == (10_000, 5_000)
    assert settings.api_max_connections == 200
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.auth_mode is AuthMode.NONE
    assert (settings.log_level, settings.log_format) == (LogLevel.INFO, LogFormat.AUTO)
    assert settings.mediator_timeout == 900
    assert settings.mediator_http_version is HttpVersion.HTTP_2
    assert settings.breaker_scope is BreakerScope.ORIGIN
    assert settings.notify_min_severity is Severity.WARN
    assert settings.naming.broker is settings.naming.embedded


@pytest.mark.rule("CFG-1")
def test_every_kind_of_value_is_read() -> None:
    settings = Settings.from_env(
        {
            "MESSAGE_ROUTER_CONFIG_URL": "https://one/config, file:///etc/two.json",
            "MESSAGE_ROUTER_ENABLED": "No",
            "MESSAGE_ROUTER_SYNC_INTERVAL": "90s",
            "MESSAGE_ROUTER_WORKER_ID": "payments-1.eu",
            "MESSAGE_ROUTER_POLL_INTERVAL": "250ms",
            "MESSAGE_ROUTER_PORT": "0",
            "MESSAGE_ROUTER_STATE_DIR": "/var/lib/router",
            "MESSAGE_ROUTER_LOG_LEVEL": "warn",
            "MEDIATOR_HTTP_TIMEOUT_MS": "1500",
            "MEDIATOR_ALLOWED_HOSTS": "*.Example.com,10.0.0.1",
            "AWS_REGION": " us-east-1 ",
        }
    )

    assert settings.config_urls == ("https://one/config", "file:///etc/two.json")
    assert settings.enabled is False
    assert settings.sync_interval == 90
    assert (settings.worker_id, settings.poll_interval) == ("payments-1.eu", 0.25)
    assert settings.port == 0
    assert settings.state_dir == Path("/var/lib/router")
    assert settings.log_level is LogLevel.WARNING
    assert settings.mediator_timeout == 1.5
    assert settings.allowed_hosts == ("*.example.com", "10.0.0.1")
    assert settings.brokers.of(SqsSettings).region == "us-east-1"


@pytest.mark.rule("CFG-1")
def test_a_blank_variable_counts_as_not_set() -> None:
    blank = {"MESSAGE_ROUTER_CONFIG_URL": "", "MESSAGE_ROUTER_PORT": "  "}

    assert Settings.from_env(blank) == Settings()


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("5m", 300), ("30s", 30), ("1h", 3600), ("500ms", 0.5), ("7", 7), ("1.5", 1.5), ("2M", 120)],
)
def test_durations_are_read_in_all_their_units(text: str, expected: float) -> None:
    assert seconds(0, 86_400)(text) == expected


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("3KiB", 3072), ("500 MiB", 524_288_000), ("1gib", 1024**3)],
)
def test_sizes_are_read_in_all_their_units(text: str, expected: int) -> None:
    assert size(0, 1024**4)(text) == expected


@pytest.mark.rule("DLQ-1")
def test_dead_letters_are_kept_up_to_a_gibibyte_without_an_age_limit_by_default() -> None:
    usual = Settings.from_env({})
    own = Settings.from_env(
        {
            "MESSAGE_ROUTER_DEAD_LETTER_RETENTION": "720h",
            "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES": "5MiB",
        }
    )

    assert (usual.dead_letter_retention, usual.dead_letter_max_bytes) == (None, 1024**3)
    assert (own.dead_letter_retention, own.dead_letter_max_bytes) == (2_592_000, 5_242_880)


@pytest.mark.rule("CFG-1")
@given(st.text())
def test_any_duration_is_within_its_limits_or_refused_in_one_line(text: str) -> None:
    parse = seconds(1, 86_400)

    try:
        parsed, line = parse(text), ""
    except NotAllowed as error:
        parsed, line = 1, str(error)

    assert 1 <= parsed <= 86_400
    assert line.isprintable()


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MESSAGE_ROUTER_PORT", "70000", "a whole number from 0 to 65535, not '70000'"),
        ("MESSAGE_ROUTER_PORT", "٣", "a whole number from 0 to 65535"),
        ("MESSAGE_ROUTER_PORT", "-1", "not '-1'"),
        ("MESSAGE_ROUTER_SYNC_INTERVAL", "0", "from 1s to 86400s, not '0'"),
        ("MESSAGE_ROUTER_POLL_INTERVAL", "0", "from 0.01s to 60s, not '0'"),
        ("MESSAGE_ROUTER_WORKER_ID", "a/b", "1 to 64 ASCII letters, digits, `.`, `_` or `-`"),
        ("MESSAGE_ROUTER_WORKER_ID", 65 * "a", "1 to 64 ASCII letters"),
        ("MESSAGE_ROUTER_SYNC_INTERVAL", "5 parsecs", "such as 500ms, 30s, 5m or 1h"),
        ("MESSAGE_ROUTER_ENABLED", "maybe", "must be true or false, not 'maybe'"),
        (
            "MESSAGE_ROUTER_QUEUE_TYPE",
            "KAFKA",
            "SQS, ACTIVEMQ, NATS, RABBITMQ, POSTGRES, EMBEDDED, PGMQ, REDIS",
        ),
        ("MESSAGE_ROUTER_CONFIG_URL", "ftp://host/x", "http:// or https:// or file://"),
        ("MESSAGE_ROUTER_CONFIG_URL", "http://[::1/x", "must be a URL"),
        ("MESSAGE_ROUTER_CONFIG_URL", "http://host:port/x", "must be a URL"),
        ("MESSAGE_ROUTER_CONFIG_URL", "http:///path", "must be a URL"),
        ("MESSAGE_ROUTER_CONFIG_URL", "file://elsewhere/x", "must be a URL"),
        ("MESSAGE_ROUTER_CONFIG_URL", "http://a b/", "must be a URL"),
        (
            "MESSAGE_ROUTER_DEAD_LETTER_URL",
            "mysql://h/db",
            "sqlite:///path, postgresql://host/database or none",
        ),
        (
            "MESSAGE_ROUTER_DEAD_LETTER_URL",
            "sqlite://relative",
            "sqlite:///path, postgresql://host/database or none",
        ),
        (
            "MESSAGE_ROUTER_DEAD_LETTER_URL",
            "sqlite:///",
            "sqlite:///path, postgresql://host/database or none",
        ),
        ("MESSAGE_ROUTER_DEAD_LETTER_RETENTION", "forever", "such as 500ms, 30s, 5m or 1h"),
        ("MESSAGE_ROUTER_DEAD_LETTER_RETENTION", "1s", "from 60s"),
        ("MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", "1MiB", "from 2097152 to"),
        ("MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", "1GB", "a size such as 500MiB, 2GiB or plain"),
        ("MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", "1.5GiB", "not '1.5GiB'"),
        ("MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", "2000GiB", "to 1099511627776 bytes"),
        ("STANDBY_LOCK_URL", "etcd://host", "redis:// or rediss:// or postgresql:// or nats://"),
        ("STANDBY_LOCK_URL", "redis:host", "must be a URL that begins with redis://"),
        ("STANDBY_LOCK_URL", "redis://", "must be a URL that begins with redis://"),
        ("STANDBY_LOCK_URL", "nats://a:4222,,b:4222", "must be a URL that begins with"),
        ("STANDBY_LOCK_TTL", "0.5", "from 1s to 3600s, not '0.5'"),
        ("MEDIATOR_HTTP_VERSION", "HTTP_3", "HTTP_2, HTTP_1_1"),
        ("MEDIATOR_ALLOWED_HOSTS", "http://x/", "host names"),
        ("MESSAGE_ROUTER_HOST", "a\x07b", "printable text"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", "5", 'JSON such as {"maxAttempts": 20, "backoff"'),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", "5 times", "(not JSON), not '5 times'"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", "\udcff", "(not JSON)"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", "[" * 10_000, "(not JSON)"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", "null", "(Expected `object`, got `null`), not 'null'"),
        (
            "MESSAGE_ROUTER_DEFAULT_RETRY",
            '{"maxAttempts":\n0}',
            r"""(maxAttempts: must be above 0), not '{"maxAttempts":\n0}'""",
        ),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", '{"maxAttempts": 1e7}', "(maxAttempts: more than 1e+06)"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", '{"backoff": [50000]}', "(backoff: more than 43200)"),
        (
            "MESSAGE_ROUTER_DEFAULT_RETRY",
            '{"statuses": [404, 500]}',
            "(statuses[1]: must be a status from 400 to 499)",
        ),
        ("OTEL_TRACES_EXPORTER", "zipkin", "one of OTLP, NONE"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "PARENTBASED_TRACEIDRATIO"),
        ("MESSAGE_ROUTER_LIMITS_URL", "nats://host", "begins with redis://"),
        ("MESSAGE_ROUTER_REPLICAS", "0", "a whole number from 1 to 1000, not '0'"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.1", "a number from 0 to 1, not '1.1'"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan", "a number from 0 to 1"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_says_what_is_allowed(
    name: str, value: str, says: str
) -> None:
    line = refusal(name, value)

    assert line.startswith(name)
    assert says in line
    assert line.isprintable()


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("{}", RetryPolicy()),
        ('{"maxAttempts": 20}', RetryPolicy(20)),
        (
            '{"maxAttempts": 5, "backoff": [10, 60.5], "statuses": [423, 408], "unknown": 1}',
            RetryPolicy(5, (10.0, 60.5), frozenset({408, 423})),
        ),
    ],
)
def test_the_default_retry_policy_is_written_as_in_the_document(
    value: str, policy: RetryPolicy
) -> None:
    settings = Settings.from_env({"MESSAGE_ROUTER_DEFAULT_RETRY": value})

    assert settings.default_retry == DefaultRetry(commands=policy, others=policy)


@pytest.mark.rule("WQ-15")
@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("", STANDARD_RETRY),
        ("standard", STANDARD_RETRY),
        ("none", ENDLESS_RETRY),
        ("None", ENDLESS_RETRY),
    ],
)
def test_there_is_a_standard_limit_which_can_be_switched_off(
    value: str, default: DefaultRetry
) -> None:
    assert Settings.from_env({"MESSAGE_ROUTER_DEFAULT_RETRY": value}).default_retry == default


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MESSAGE_ROUTER_CONFIG_TOKEN", "hunter2\x00"),
        ("MESSAGE_ROUTER_CONFIG_TOKEN", "hunter2ü"),
        ("MESSAGE_ROUTER_API_TOKEN", "hunter2\nx"),
        ("MESSAGE_ROUTER_CONFIG_URL", "ftp://user:hunter2@host/"),
        ("MESSAGE_ROUTER_CONFIG_URL", "https://ok/,htp//user:hunter2@host/"),
        ("MESSAGE_ROUTER_CONFIG_URL", "ftp://host/?token=hunter2"),
        ("MESSAGE_ROUTER_CONFIG_URL", "ftp://host/#token=hunter2"),
        ("RABBITMQ_URL", "http://user:hunter2@host/"),
        ("NOTIFY_SLACK_URL", "slack:hunter2"),
        ("MEDIATOR_PROXY", "user:hunter2@proxy"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "user:hunter2@collector:4318"),
    ],
)
def test_a_secret_is_masked_when_it_is_refused(name: str, value: str) -> None:
    line = refusal(name, value)

    assert "hunter2" not in line
    assert "***" in line or "'ftp://host/'" in line


@pytest.mark.rule("CFG-1")
def test_secrets_and_urls_are_not_in_the_repr() -> None:
    settings = Settings.from_env(
        {
            "MESSAGE_ROUTER_CONFIG_URL": "https://user:hunter2@host/",
            "MESSAGE_ROUTER_CONFIG_TOKEN": "hunter2",
            "MESSAGE_ROUTER_API_TOKEN": "hunter2",
            "AUTH_BASIC_PASSWORD": "hunter2",
            "RABBITMQ_URL": "amqp://user:hunter2@host/",
            "NATS_SERVERS": "nats://user:hunter2@host",
            "SQS_ENDPOINT_OVERRIDE": "http://user:hunter2@host",
            "MEDIATOR_PROXY": "http://user:hunter2@host",
        }
    )

    assert "hunter2" not in repr(settings)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"MESSAGE_ROUTER_AUTH_MODE": "BASIC"}, "AUTH_BASIC_USERNAME"),
        (
            {"MESSAGE_ROUTER_AUTH_MODE": "basic", "AUTH_BASIC_USERNAME": "me"},
            "AUTH_BASIC_PASSWORD",
        ),
        ({"MESSAGE_ROUTER_AUTH_MODE": "TOKEN"}, "MESSAGE_ROUTER_API_TOKEN"),
        ({"MESSAGE_ROUTER_AUTH_MODE": "OIDC"}, "OIDC_ISSUER"),
        (
            {"MESSAGE_ROUTER_AUTH_MODE": "oidc", "OIDC_ISSUER": "https://id.example"},
            "OIDC_AUDIENCE",
        ),
    ],
)
def test_an_auth_mode_without_its_credentials_is_refused(env: dict[str, str], missing: str) -> None:
    with pytest.raises(BadSetting, match=f"^{missing} must be set"):
        Settings.from_env(env)


@pytest.mark.rule("CFG-1")
def test_an_auth_mode_with_its_credentials_is_taken() -> None:
    basic = {
        "MESSAGE_ROUTER_AUTH_MODE": "BASIC",
        "AUTH_BASIC_USERNAME": "me",
        "AUTH_BASIC_PASSWORD": "pw",
    }

    assert Settings.from_env(basic).auth_mode is AuthMode.BASIC


@pytest.mark.rule("CFG-1")
def test_bare_queue_names_are_sqs_queues_once_there_is_a_config_url() -> None:
    with_url = Settings.from_env({"MESSAGE_ROUTER_CONFIG_URL": "http://host/"})
    told = Settings(config_urls=("http://host/",), queue_type="NATS")

    assert with_url.naming.broker.queue_type == "SQS"
    assert told.naming.broker.queue_type == "NATS"


@pytest.mark.rule("CFG-1")
def test_state_is_kept_under_an_absolute_path_wherever_the_process_goes_later() -> None:
    settings = Settings.from_env({"MESSAGE_ROUTER_STATE_DIR": "here"})

    assert settings.naming.state_dir == str(Path.cwd() / "here")
    assert settings.dead_letter_path == Path.cwd() / "here" / "dead-letters.db"


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("NONE", None),
        ("sqlite:///var/dead%20letters.db", Path("/var/dead letters.db")),
        ("sqlite:////var/dead.db", Path("/var/dead.db")),
    ],
)
def test_dead_letters_go_where_they_are_told(url: str, path: Path | None) -> None:
    settings = Settings.from_env({"MESSAGE_ROUTER_DEAD_LETTER_URL": url})

    assert settings.dead_letter_path == path


@pytest.mark.rule("CFG-1", "CFG-9")
def test_a_standby_needs_to_know_where_the_lock_is() -> None:
    with pytest.raises(BadSetting, match="STANDBY_LOCK_URL must be set when STANDBY_ENABLED"):
        Settings.from_env({"STANDBY_ENABLED": "true"})


@pytest.mark.rule("CFG-1", "CFG-9")
@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@host:6379/0",
        "rediss://host",
        "postgresql://user:secret@one:5432,two:5432/db?target_session_attrs=read-write",
        "nats://one:4222,two:4222",
    ],
)
def test_the_lock_may_be_on_one_server_or_on_several(url: str) -> None:
    settings = Settings.from_env({"STANDBY_ENABLED": "true", "STANDBY_LOCK_URL": url})

    assert settings.standby_lock_url == url
    assert "secret" not in repr(settings)


@pytest.mark.rule("CFG-1", "LIM-2")
def test_limits_are_divided_by_the_routers_that_work_at_the_same_time() -> None:
    three = {"MESSAGE_ROUTER_REPLICAS": "3"}
    standby = {"STANDBY_ENABLED": "true", "STANDBY_LOCK_URL": "redis://host"}
    alone, active, spare, still = (
        Settings.from_env(env) for env in ({}, three, three | standby, standby)
    )

    assert [each.limit_sharers for each in (alone, active, spare, still)] == [1, 3, 1, 1]
    assert [alone.notes(), active.notes(), still.notes()] == [[], [], []]
    assert spare.notes() == [
        "MESSAGE_ROUTER_REPLICAS is ignored: with STANDBY_ENABLED one router works"
    ]


@pytest.mark.rule("CFG-1", "CFG-10", "LIM-1")
def test_leases_of_queues_need_a_standby_and_their_server_shares_limits_too() -> None:
    scope = {"STANDBY_SCOPE": "queue", "MESSAGE_ROUTER_REPLICAS": "3"}
    redis, nats = (
        Settings.from_env({**scope, "STANDBY_ENABLED": "true", "STANDBY_LOCK_URL": url})
        for url in ("redis://host", "nats://host")
    )
    alone = Settings.from_env(scope)
    spare = Settings.from_env({"STANDBY_ENABLED": "true", "STANDBY_LOCK_URL": "redis://host"})

    assert [each.leases_queues for each in (redis, nats, alone, spare)] == [
        True,
        True,
        False,
        False,
    ]
    assert [each.limits_server for each in (redis, nats, alone, spare)] == [
        "redis://host",
        None,
        None,
        None,
    ]
    assert (redis.limit_sharers, redis.notes()) == (3, [])
    assert alone.notes() == ["STANDBY_SCOPE has no effect without STANDBY_ENABLED"]


@pytest.mark.rule("CFG-1")
def test_an_unknown_name_is_noted_and_harmless() -> None:
    env = {"MESSAGE_ROUTER_CONFIG_URI": "x", "MESSAGE_ROUTER_ZZZZZZ": "x", "PATH": "/bin"}

    Settings.from_env(env)

    assert setting_notes(env) == [
        "MESSAGE_ROUTER_CONFIG_URI is not a setting: did you mean MESSAGE_ROUTER_CONFIG_URL?",
        "MESSAGE_ROUTER_ZZZZZZ is not a setting",
    ]


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("policy", "notes"),
    [
        ('{"maxAttemps": 20}', ["maxAttemps is ignored: did you mean maxAttempts?"]),
        ('{"maxAttempts": 20, "x": 1}', ["x is ignored"]),
        ('{"maxAttempts": 20}', []),
        ("standard", []),
        ("", []),
    ],
)
def test_what_the_default_retry_policy_ignores_is_noted(policy: str, notes: list[str]) -> None:
    env = {"MESSAGE_ROUTER_DEFAULT_RETRY": policy}

    Settings.from_env(env)

    assert setting_notes(env) == [f"MESSAGE_ROUTER_DEFAULT_RETRY: {note}" for note in notes]


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    "env", [{"NOTIFY_SMTP_URL": "smtp://mail"}, {"NOTIFY_EMAIL_TO": "ops@example.com"}]
)
def test_a_mail_server_and_those_who_get_mail_go_together(env: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match="NOTIFY_SMTP_URL and NOTIFY_EMAIL_TO go together"):
        Settings.from_env(env)


@pytest.mark.rule("CFG-1")
def test_what_kubernetes_sets_beside_a_service_of_our_name_is_not_ours() -> None:
    env = {
        "MESSAGE_ROUTER_PORT": "tcp://10.0.0.7:8080",
        "MESSAGE_ROUTER_PORT_8080_TCP": "tcp://10.0.0.7:8080",
        "MESSAGE_ROUTER_SERVICE_HOST": "10.0.0.7",
    }

    assert Settings.from_env(env).port == 8080
    assert setting_notes(env) == []


@pytest.mark.rule("CFG-1")
def test_the_table_for_people_has_a_row_for_every_variable() -> None:
    lines = settings_table().splitlines()

    assert lines[:2] == ["| variable | default | meaning |", "|---|---|---|"]
    assert "| `MESSAGE_ROUTER_PORT` | `8080` | port of the API; 0 picks a free one |" in lines
    assert len(lines) == 2 + len(list(variables()))
    assert all(line.count("|") == 4 for line in lines)


TRACES_AT = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in"}
COLLECTOR_AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("env", "endpoint"),
    [
        ({}, None),
        (COLLECTOR_AT, "http://c:4318/v1/traces"),
        (TRACES_AT, "https://c/in"),
        (COLLECTOR_AT | TRACES_AT, "https://c/in"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        (COLLECTOR_AT | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (COLLECTOR_AT | {"OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_SERVICE_NAME": "router", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, None),
    ],
)
def test_traces_are_off_until_they_are_given_somewhere_to_go(
    env: dict[str, str], endpoint: str | None
) -> None:
    assert Settings.from_env(env).traces_endpoint == endpoint


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("infix", ["", "TRACES_"])
def test_a_protocol_that_we_do_not_speak_matters_only_if_there_are_traces(infix: str) -> None:
    env = {f"OTEL_EXPORTER_OTLP_{infix}PROTOCOL": "grpc"}

    off = Settings.from_env(env | COLLECTOR_AT | {"OTEL_TRACES_EXPORTER": "none"})
    with pytest.raises(BadSetting, match="must be http/protobuf, not 'grpc'"):
        Settings.from_env(env | COLLECTOR_AT)

    assert off.traces_endpoint is None
    assert Settings.from_env(env).traces_endpoint is None


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        ("always_on", SamplingRule(1.0, follows_parent=False)),
        ("always_off", SamplingRule(0.0, follows_parent=False)),
        ("traceidratio", SamplingRule(0.25, follows_parent=False)),
        ("parentbased_always_on", SamplingRule(1.0)),
        ("parentbased_always_off", SamplingRule(0.0)),
        ("parentbased_traceidratio", SamplingRule(0.25)),
        ("", SamplingRule(1.0)),
    ],
)
def test_samplers_are_called_as_everywhere(sampler: str, rule: SamplingRule) -> None:
    env = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": "0.25"}

    assert Settings.from_env(env).sampling == rule
