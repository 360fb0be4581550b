"""The chart as Helm renders it, and what a pod would make of it."""

import json
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.chart import CHART

HELM: Final = Path(sys.executable).with_name("helm")
EXAMPLES: Final = sorted((CHART / "examples").glob("*.yaml"))
NAMESPACE: Final = "shop"
POD: Final = "router-message-router-0"

Manifest = Mapping[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Release:
    """Everything that one set of values makes."""

    manifests: Sequence[Manifest]

    @property
    def kinds(self) -> set[str]:
        return {manifest["kind"] for manifest in self.manifests}

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def the(self, kind: str) -> Manifest:
        (manifest,) = self.all(kind)
        return manifest

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.the("StatefulSet")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        checked: Manifest = container
        return checked

    @property
    def env(self) -> Mapping[str, Manifest]:
        return {entry["name"]: entry for entry in self.container["env"]}

    def environment(self) -> Mapping[str, str]:
        """What the process would see."""
        return {name: self._seen(entry) for name, entry in self.env.items()}

    def _seen(self, entry: Manifest) -> str:
        match entry:
            case {"value": str(value)}:
                return value
            case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
                return POD
            case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                return self._secret(name, key)
        raise ValueError(f"nobody knows what {entry} is")

    def _secret(self, name: str, key: str) -> str:
        """Of a Secret that the chart does not make, whatever its key's setting accepts."""
        for secret in self.all("Secret"):
            if secret["metadata"]["name"] == name:
                return b64decode(secret["data"][key]).decode()
        return f"redis://{name}/{key}"


class Refused(Exception):
    """Helm would not render it."""


def render(values: Values) -> Release:
    return Release(_rendered(CHART, values))


def notes(values: Values, folder: Path) -> str:
    """What Helm prints after an installation. It does so only where there is a cluster, so that in
    a copy of the chart the text is a manifest.
    """
    copy = shutil.copytree(CHART, folder / CHART.name)
    text = (copy / "templates/NOTES.txt").read_text()
    shown = '{{ define "notes" }}' + text + '{{ end }}notes: {{ include "notes" . | quote }}'
    (copy / "templates/notes.yaml").write_text(shown)
    rendered = _rendered(copy, values)
    (found,) = (manifest["notes"] for manifest in rendered if "notes" in manifest)
    return str(found)


def example(path: Path) -> Values:
    values: Values = yaml.safe_load(path.read_text())
    return values


def _rendered(chart: Path, values: Values) -> list[Manifest]:
    text = helm("template", "router", str(chart), "--values", "-", stdin=json.dumps(values))
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def helm(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [HELM, *words, "--namespace", NAMESPACE],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "HOME": str(CHART)},  # nobody's own charts and clusters
    )
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout
