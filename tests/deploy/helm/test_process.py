"""The real process in the environment that the chart gives it."""

from pathlib import Path

import pytest

from tests.acceptance.site import Site
from tests.deploy.helm.rendering import render


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.rule("OPS-3", "OPS-4")
async def test_the_paths_that_kubernetes_and_prometheus_ask_for_answer(tmp_path: Path) -> None:
    release = render({"serviceMonitor": {"enabled": True}})
    here = {"MESSAGE_ROUTER_HOST": "127.0.0.1", "MESSAGE_ROUTER_PORT": "0"}
    folders = dict.fromkeys(("MESSAGE_ROUTER_STATE_DIR", "TMPDIR"), str(tmp_path))
    site = Site(tmp_path, settings={**release.environment(), **here, **folders})
    probes = [
        release.container[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "liveness", "readiness")
    ]
    paths = [probe["path"] for probe in probes]
    (endpoint,) = release.the("ServiceMonitor")["spec"]["endpoints"]

    async with site.router() as router:
        answers = [(await router.get(path)).status_code for path in (*paths, endpoint["path"])]
        code = await router.stop()

    ports = {port["name"] for port in release.container["ports"]}
    assert {probe["port"] for probe in probes} <= ports
    assert paths == ["/health/startup", "/health/live", "/health/ready"]
    assert answers == [200, 200, 200, 200]
    assert code == 0
