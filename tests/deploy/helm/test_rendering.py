"""What the chart makes: of Kubernetes' form, and in line with the router inside."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from router.api.metrics import METRICS
from router.core.config_document import read_document
from router.engine.consumer import RECEIVE_GRACE_SECONDS
from router.engine.queue_manager import ABORT_GRACE_SECONDS
from router.outbound.config_source import ATTEMPT_SECONDS
from router.settings import Settings, variables
from tests.deploy.helm.rendering import EXAMPLES, NAMESPACE, POD, Refused, example, notes, render
from tests.support.chart import CHART

ROOT: Final = CHART.parents[2]
OLDEST: Final = "1.27"  # as Chart.yaml says
NEWEST: Final = kubernetes_validate.latest_version()
NAMES: Final = {variable.name for variable in variables()}
SECRETS: Final = {variable.name for variable in variables() if variable.secret}
BY_URL: Final = {"routing": {"url": "https://config.example.com/routing.json"}}
STRICT: Final = {
    "routing": {"document": {"queues": [{"queueUri": "nats://n/?stream=S", "ordering": "strict"}]}},
    "settings": {"MESSAGE_ROUTER_DEAD_LETTER_URL": "none"},
}
ACTIVE: Final = {**BY_URL, "mode": "active-active"}
KEDA: Final = {"enabled": True, "prometheus": {"address": "http://prometheus:9090"}}
STANDBY: Final = {
    **BY_URL,
    "mode": "standby",
    "secrets": {"values": {"STANDBY_LOCK_URL": "redis://:hunter2@redis:6379/0"}},
}
LEASES: Final = {**STANDBY, "mode": "leases"}
NO_VOLUME: Final = {
    **BY_URL,
    "persistence": {"enabled": False},
    "settings": {"MESSAGE_ROUTER_DEAD_LETTER_URL": "none"},
}
SCALED: Final = {
    **ACTIVE,
    "keda": KEDA,
}
MONITORED: Final = {
    name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")
}
DOCUMENT: Final = {
    "queues": [{"queueName": "orders", "queueUri": "sqs://orders.fifo"}],
    "processingPools": [{"code": "ORDERS", "concurrency": 5}],
}


def strict_by(**fields: str) -> dict[str, Any]:
    """Values of several pods with a strict queue, and no order store that they share."""
    entry = {"queueUri": "nats://n/?stream=S", "ordering": "strict", **fields}
    return {"mode": "active-active", "routing": {"document": {"queues": [entry]}}}


# What their operators know, of what the chart uses: there are no schemas of these in any package.
CUSTOM_FIELDS: Final = {
    "ServiceMonitor": {
        "jobLabel",
        "selector.matchLabels.*",
        "endpoints.[].port",
        "endpoints.[].path",
        "endpoints.[].interval",
    },
    "PrometheusRule": {
        "groups.[].name",
        "groups.[].rules.[].alert",
        "groups.[].rules.[].expr",
        "groups.[].rules.[].for",
        "groups.[].rules.[].labels.*",
        "groups.[].rules.[].annotations.*",
    },
    "ScaledObject": {
        "scaleTargetRef.apiVersion",
        "scaleTargetRef.kind",
        "scaleTargetRef.name",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds",
        "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.[].type",
        "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.[].value",
        "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.[].periodSeconds",
        "triggers.[].type",
        "triggers.[].metadata.*",
    },
}
MAPS: Final = {"matchLabels", "labels", "annotations", "metadata"}  # whose keys are free

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def fields_of(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from fields_of(item, f"{path}.[]")
    elif isinstance(value, dict) and path.rpartition(".")[2] in MAPS:
        yield f"{path}.*"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from fields_of(item, f"{path}.{key}" if path else key)
    else:
        yield path


@each_example
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.rule("CFG-1")
def test_everything_of_an_example_is_what_kubernetes_expects(path: Path, version: str) -> None:
    release = render(example(path))

    for manifest in release.manifests:
        if manifest["kind"] not in CUSTOM_FIELDS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.rule("OPS-3")
def test_custom_resources_have_no_field_that_their_operators_do_not_know() -> None:
    release = render({**SCALED, **MONITORED})

    for kind, known in CUSTOM_FIELDS.items():
        assert set(fields_of(release.the(kind)["spec"])) <= known


@each_example
@pytest.mark.rule("CFG-1")
def test_every_variable_of_an_example_is_a_setting(path: Path) -> None:
    release = render(example(path))

    assert set(release.env) - NAMES == {"TMPDIR"}


@pytest.mark.parametrize(
    "values", [{}, BY_URL, ACTIVE, STANDBY, {"routing": {"document": DOCUMENT}}]
)
@pytest.mark.rule("CFG-1")
def test_the_router_accepts_the_environment_and_finds_in_it_what_the_pod_has(
    values: dict[str, Any],
) -> None:
    release = render(values)

    settings = Settings.from_env(release.environment())

    mounts = {mount["name"]: mount["mountPath"] for mount in release.container["volumeMounts"]}
    assert settings.host == "0.0.0.0"  # noqa: S104  the kubelet does not come over loopback
    assert [port["containerPort"] for port in release.container["ports"]] == [settings.port]
    assert str(settings.state_dir) == mounts["state"] == release.environment()["TMPDIR"]
    assert settings.standby_instance_id == POD


@pytest.mark.rule("CFG-1")
def test_numbers_and_switches_reach_the_router_as_they_were_written() -> None:
    release = render(
        {"settings": {"MEDIATOR_HTTP_TIMEOUT_MS": 86400000, "MEDIATOR_BLOCK_PRIVATE": True}}
    )

    settings = Settings.from_env(release.environment())

    assert settings.mediator_timeout == 86400
    assert settings.block_private


@pytest.mark.rule("CFG-1")
def test_a_secret_is_refused_among_the_settings() -> None:
    with pytest.raises(Refused) as refused:
        render({"settings": dict.fromkeys(SECRETS, "hunter2")})

    assert all(name in str(refused.value) for name in SECRETS)
    assert "hunter2" not in str(refused.value)


@pytest.mark.rule("CFG-1")
def test_secrets_are_in_a_secret_and_nowhere_else() -> None:
    release = render({"secrets": {"values": dict.fromkeys(SECRETS, "hunter2")}})

    elsewhere = [manifest for manifest in release.manifests if manifest["kind"] != "Secret"]
    assert set(release.the("Secret")["data"]) == SECRETS
    assert {release.environment()[name] for name in SECRETS} == {"hunter2"}
    assert all("secretKeyRef" in release.env[name]["valueFrom"] for name in SECRETS)
    assert "hunter2" not in json.dumps(elsewhere)


@pytest.mark.rule("CFG-1")
def test_a_changed_secret_restarts_the_pods() -> None:
    def annotations(token: str) -> Any:
        release = render({"secrets": {"values": {"MESSAGE_ROUTER_API_TOKEN": token}}})
        return release.the("StatefulSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations("one") == annotations("one")
    assert annotations("one") != annotations("two")


@pytest.mark.rule("CFG-1")
def test_a_secret_that_is_there_already_is_only_referred_to() -> None:
    release = render({"secrets": {"existing": {"RABBITMQ_URL": {"name": "broker", "key": "url"}}}})

    assert "Secret" not in release.kinds
    source = release.env["RABBITMQ_URL"]["valueFrom"]["secretKeyRef"]
    assert source == {"name": "broker", "key": "url"}


@pytest.mark.rule("CFG-2")
def test_a_routing_document_is_mounted_where_the_router_reads_it() -> None:
    release = render({"routing": {"document": DOCUMENT}})

    settings = Settings.from_env(release.environment())
    (routing,) = (v for v in release.container["volumeMounts"] if v["name"] == "routing")
    content = release.the("ConfigMap")["data"]
    found = read_document(content["routing.json"].encode(), settings.naming)
    assert settings.config_urls == (f"file://{routing['mountPath']}/routing.json",)
    assert "subPath" not in routing, "a change would never reach the pod"
    assert [queue.name for queue in found.config.queues] == ["orders"]
    assert found.problems == ()


@pytest.mark.rule("CFG-2")
def test_the_routing_documents_of_the_examples_are_sound() -> None:
    documents = [
        json.dumps(values["routing"]["document"])
        for values in map(example, EXAMPLES)
        if "document" in values.get("routing", {})
    ]

    assert documents
    for document in documents:
        assert read_document(document.encode(), Settings().naming).problems == ()


@pytest.mark.rule("OPS-4")
@pytest.mark.parametrize("seconds", [0, 30, 600])
def test_kubernetes_waits_longer_than_a_shutdown_may_take(seconds: int) -> None:
    release = render({"shutdown": {"timeoutSeconds": seconds}})

    grace = Settings.from_env(release.environment()).shutdown_timeout
    longest = max(grace + ABORT_GRACE_SECONDS, RECEIVE_GRACE_SECONDS) + ABORT_GRACE_SECONDS
    assert grace == seconds
    assert release.pod["terminationGracePeriodSeconds"] >= longest + 5


@pytest.mark.rule("CFG-3", "OPS-3")
def test_the_first_sync_has_time_for_all_its_attempts() -> None:
    release = render({})

    probe = release.container["startupProbe"]
    settings = Settings()
    needed = settings.config_attempts * (ATTEMPT_SECONDS + settings.config_retry_delay)
    assert probe["periodSeconds"] * probe["failureThreshold"] > needed


@pytest.mark.rule("OPS-3")
def test_nothing_of_the_pod_is_more_than_it_needs() -> None:
    release = render({})

    pod, container = release.pod["securityContext"], release.container["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] == pod["fsGroup"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"]
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert release.pod["automountServiceAccountToken"] is False
    assert release.pod["enableServiceLinks"] is False
    assert release.pod["serviceAccountName"] == release.the("ServiceAccount")["metadata"]["name"]
    assert release.container["resources"]["requests"].keys() == {"cpu", "memory"}


@pytest.mark.rule("DLQ-1", "WQ-1")
def test_each_pod_has_a_volume_of_its_own_that_outlives_it() -> None:
    stateful = render({"persistence": {"size": "20Gi"}}).the("StatefulSet")["spec"]

    (claim,) = stateful["volumeClaimTemplates"]
    kept = stateful["persistentVolumeClaimRetentionPolicy"]
    assert claim["metadata"]["name"] == "state"
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert kept == {"whenDeleted": "Retain", "whenScaled": "Retain"}


@pytest.mark.rule("DLQ-1")
def test_without_volumes_the_state_directory_is_still_writable() -> None:
    release = render(
        {
            **BY_URL,
            "persistence": {"enabled": False},
            "settings": {"MESSAGE_ROUTER_DEAD_LETTER_URL": "none"},
        }
    )

    assert {"name": "state", "emptyDir": {}} in release.pod["volumes"]
    assert "volumeClaimTemplates" not in release.the("StatefulSet")["spec"]


@pytest.mark.rule("CFG-9")
def test_of_a_standby_there_are_two_each_by_its_own_name_with_the_lock_from_a_secret() -> None:
    release = render(STANDBY)

    assert release.the("StatefulSet")["spec"]["replicas"] == 2
    assert release.environment()["STANDBY_ENABLED"] == "true"
    assert release.environment()["STANDBY_INSTANCE_ID"] == POD
    assert release.environment()["STANDBY_LOCK_URL"] == "redis://:hunter2@redis:6379/0"
    assert "secretKeyRef" in release.env["STANDBY_LOCK_URL"]["valueFrom"]


@pytest.mark.rule("CFG-9")
@pytest.mark.parametrize(("values", "pods"), [({}, 1), (ACTIVE, 2), ({**ACTIVE, "replicas": 7}, 7)])
def test_elsewhere_there_is_no_standby(values: dict[str, Any], pods: int) -> None:
    release = render(values)

    assert release.the("StatefulSet")["spec"]["replicas"] == pods
    assert release.environment()["STANDBY_ENABLED"] == "false"


@pytest.mark.rule("CFG-10")
def test_with_leases_all_pods_work_on_the_queues_that_they_hold() -> None:
    release = render({**STANDBY, "mode": "leases", "replicas": 3})

    settings = Settings.from_env(release.environment())
    assert release.the("StatefulSet")["spec"]["replicas"] == 3
    assert settings.leases_queues
    assert settings.limit_sharers == 3


@pytest.mark.rule("LIM-2")
@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ({}, None),
        (STANDBY, None),
        (SCALED, None),
        (ACTIVE, "2"),
        ({**ACTIVE, "replicas": 7}, "7"),
        ({**ACTIVE, "settings": {"MESSAGE_ROUTER_REPLICAS": 1}}, "1"),
    ],
)
def test_pods_share_limits_if_a_fixed_number_of_them_works(
    values: dict[str, Any], replicas: str | None
) -> None:
    assert render(values).environment().get("MESSAGE_ROUTER_REPLICAS") == replicas


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize("values", [STANDBY, ACTIVE, SCALED])
def test_of_several_pods_a_drain_takes_one_at_a_time_and_they_keep_apart(
    values: dict[str, Any],
) -> None:
    release = render(values)

    budget = release.the("PodDisruptionBudget")["spec"]
    labels = release.the("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert release.pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.rule("OPS-3")
def test_a_single_pod_does_not_stop_the_drain_of_its_node() -> None:
    assert "PodDisruptionBudget" not in render({}).kinds


@pytest.mark.rule("OPS-1")
def test_keda_decides_how_many_pods_there_are_by_a_metric_that_exists() -> None:
    release = render(SCALED)

    stateful, scaled = release.the("StatefulSet"), release.the("ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    assert "replicas" not in stateful["spec"], "each upgrade would undo what KEDA did"
    assert scaled["scaleTargetRef"] == {
        "apiVersion": stateful["apiVersion"],
        "kind": stateful["kind"],
        "name": stateful["metadata"]["name"],
    }
    assert scaled["minReplicaCount"] >= 1
    assert "message_router_queue_depth" in {metric.name for metric in METRICS}
    assert trigger["metadata"]["query"] == (
        "sum(max by (queue) (message_router_queue_depth"
        f'{{namespace="{NAMESPACE}",service="router-message-router"}}))'
    )
    assert trigger["metadata"]["ignoreNullValues"] == "false"


@pytest.mark.rule("OPS-1")
def test_keda_takes_the_triggers_of_brokers_as_they_are() -> None:
    trigger = {"type": "aws-sqs-queue", "metadata": {"queueURL": "https://sqs/1/orders.fifo"}}

    release = render({**ACTIVE, "keda": {"enabled": True, "triggers": [trigger]}})

    assert release.the("ScaledObject")["spec"]["triggers"] == [trigger]


@pytest.mark.rule("OPS-3")
def test_prometheus_scrapes_each_pod_once_as_the_job_that_the_alerts_name() -> None:
    release = render(MONITORED)

    monitor = release.the("ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"]
    (service,) = (
        each
        for each in release.all("Service")
        if wanted.items() <= each["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["endpoints"]
    job = service["metadata"]["labels"][monitor["jobLabel"]]
    assert f'job="{job}"' in (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert service["spec"].get("clusterIP") != "None"


@pytest.mark.rule("OPS-3")
def test_alerts_and_board_are_those_of_the_project() -> None:
    release = render(MONITORED)

    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    board = (ROOT / "deploy/grafana/message-router.json").read_text()
    assert release.the("PrometheusRule")["spec"] == alerts
    assert release.the("ConfigMap")["data"] == {"message-router.json": board}


@pytest.mark.rule("MED-5")
def test_the_network_policy_opens_the_api_to_the_namespace_and_to_whom_is_named() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}

    policy = render({"networkPolicy": {"ingressFrom": [prometheus]}}).the("NetworkPolicy")["spec"]

    (rule,) = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"]
    assert rule["from"] == [{"podSelector": {}}, prometheus]
    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]


@pytest.mark.rule("MED-5")
def test_with_rules_for_what_is_called_the_network_policy_lets_out_that_and_names() -> None:
    broker = {"ports": [{"protocol": "TCP", "port": 5672}]}

    policy = render({"networkPolicy": {"egress": [broker]}}).the("NetworkPolicy")["spec"]

    names, other = policy["egress"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert other == broker


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicas": 2}, "mode single is one pod"),
        ({"mode": "active-active"}, "embedded queue is in one pod's own volume"),
        ({**STANDBY, "routing": {}}, "embedded queue is in one pod's own volume"),
        ({**BY_URL, "mode": "standby"}, "needs STANDBY_LOCK_URL"),
        ({**BY_URL, "mode": "leases"}, "mode leases needs STANDBY_LOCK_URL"),
        ({**STRICT, "persistence": {"enabled": False}}, "a strict queue stores failed groups"),
        ({**STRICT, "mode": "active-active"}, "a strict queue stores failed groups"),
        (strict_by(onFailure="block", onDeadLetter="hold"), "a strict queue stores failed groups"),
        (strict_by(onFailure="park"), "a strict queue stores failed groups"),
        ({"persistence": {"enabled": False}}, "messages are lost with the pod"),
        ({**BY_URL, "persistence": {"enabled": False}}, "dead letters are lost with the pod"),
        ({**BY_URL, "keda": {"enabled": True}}, "mode single is one pod"),
        ({**STANDBY, "keda": {"enabled": True}}, "needs mode active-active"),
        ({**ACTIVE, "keda": {"enabled": True}}, "something that reports how much waits"),
        ({"routing": {"url": "https://c", "existingSecret": "s"}}, "give one of url"),
        (
            {"routing": {"document": {"queues": [{"queueUri": "amqp://me:hunter2@mq/?queue=q"}]}}},
            "holds a password",
        ),
        (
            {
                "settings": {"AWS_REGION": "eu-west-1"},
                "secrets": {"values": {"AWS_REGION": "eu-west-2"}},
            },
            "AWS_REGION is given twice",
        ),
        ({"settings": {"MESSAGE_ROUTER_LOGLEVEL": "DEBUG"}}, "MESSAGE_ROUTER_LOGLEVEL"),
        ({"settings": {"MESSAGE_ROUTER_PORT": "9090"}}, "MESSAGE_ROUTER_PORT"),
        ({"mode": "active"}, "mode"),
        ({"replicaCount": 3}, "replicaCount"),
    ],
)
@pytest.mark.rule("CFG-1", "P1")
def test_values_that_contradict_each_other_or_lose_messages_are_refused(
    values: dict[str, Any], why: str
) -> None:
    with pytest.raises(Refused, match=why) as refused:
        render(values)

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"onFailure": "block"},
        {"onFailure": "skip"},
        {"queueUri": "postgresql:///?queue=orders"},
        {"queueUri": "https://sqs.eu-west-1.amazonaws.com/1/orders.fifo"},
        {"queueUri": "pgmq:///?queue=orders&fifo=true"},
        {"ordering": "batch"},
    ],
)
@pytest.mark.rule("ORD-1")
def test_strict_queues_that_store_nothing_need_no_order_store(fields: dict[str, str]) -> None:
    assert render(strict_by(**fields)).the("StatefulSet")


@pytest.mark.rule("ORD-1")
def test_a_pool_makes_queues_strict_that_say_nothing_else() -> None:
    document = {
        "queues": [{"queueUri": "nats://n/?stream=S"}],
        "processingPools": [{"code": "A", "ordering": "strict"}],
    }

    with pytest.raises(Refused, match="a strict queue stores failed groups"):
        render({"mode": "active-active", "routing": {"document": document}})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "Messages wait in a file of the pod's own volume"),
        ({}, "it asks for no credentials"),
        (ACTIVE, "on SQS FIFO, on PostgreSQL, on PGMQ"),
        (SCALED, "the full concurrency and rate of every pool"),
        ({**LEASES, "keda": KEDA}, "Pods that KEDA adds take queues that become free"),
        ({**LEASES, "keda": KEDA}, "If STANDBY_LOCK_URL is a NATS server, the full rate, too"),
        (NO_VOLUME, "they need MESSAGE_ROUTER_ORDER_STORE"),
        (STANDBY, "Each pod keeps its own dead letters"),
        (MONITORED, "name it in networkPolicy.ingressFrom"),
    ],
)
@pytest.mark.rule("OPS-3")
def test_whoever_installs_it_is_told_what_to_know(
    values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    text = notes(values, tmp_path)

    assert told in text
    assert "hunter2" not in text
