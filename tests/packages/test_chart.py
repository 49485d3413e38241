"""The Helm chart, rendered by Helm's own engine: plain manifests, other and wrong values."""

import subprocess
import sys
from pathlib import Path

import pytest

import batchd
from batchd.config.load import load_config
from support.deploy_tools import DEPLOY, kubernetes_complaints

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (pip install helm-python-sdk)")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")

CHART = DEPLOY / "helm/batchd"
RELEASE = "photos"
WARNING = 2
"""Helm's severity of a finding. What is below is a recommendation."""
CASES = {
    "as it is": {},
    "one host": {"remote": {"enabled": False}},
    "prepared nodes": {"remote": {"enabled": False}, "daemon": {"prepareRuntimeDirectory": False}, "data": []},
    "workers": {"workers": {"enabled": True, "replicas": 3}},
    "workers alone reach the daemons": {"workers": {"enabled": True}, "remote": {"enabled": False}},
    "scaled workers": {
        "workers": {
            "enabled": True,
            "gateways": 3,
            "perPod": 2,
            "args": ["--map=/data=/mnt/data"],
            "nodeSelector": {"cpus": "many"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}]},
            "scaling": {"enabled": True},
        }
    },
    "everything of the daemon": {
        "image": {"repository": "registry.example.org/batchd", "tag": "x", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "data": [
            {"name": "photos", "path": "/data", "volume": {"persistentVolumeClaim": {"claimName": "photos"}}},
            {"name": "more", "path": "/more", "volume": {"nfs": {"server": "192.0.2.1", "path": "/"}}},
        ],
        "env": [{"name": "AWS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}],
        "daemon": {
            "nodeSelector": {"batchd": None, "gpu": "yes"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "priorityClassName": "system-node-critical",
            "podAnnotations": {"prometheus.io/scrape": "true"},
            "runtimeDirectory": "/run/photos",
        },
    },
}
WRONG = {
    "demon": {"demon": {}},
    "workers": {"workers": {"count": 8}},
    "gateways": {"workers": {"gateways": 9}},
    "remote": {"remote": {"enabled": "no"}},
    "volume": {"data": [{"name": "data", "path": "/data"}]},
    "cacheSize": {"daemon": {"cacheSize": "4 GiB"}},
}


def rendered(values: dict, release: str = RELEASE) -> dict[str, str]:
    """Return the text of each template, by its file's name, in a namespace ``ml``."""
    with helm.Chart.load(CHART) as chart:
        return {Path(name).name: text for name, text in chart.render(values, name=release, namespace="ml").items()}


def objects(values: dict, release: str = RELEASE) -> dict[tuple[str, str], dict]:
    """Return all objects of a release, by kind and name."""
    texts = [text for name, text in rendered(values, release).items() if name.endswith(".yaml")]
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def test_the_plain_manifests_are_those_of_the_chart(tmp_path) -> None:
    """`make manifests` was run after the last change of the chart."""
    subprocess.run([sys.executable, DEPLOY / "helm/render.py", tmp_path], check=True)
    new = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.yaml")}
    plain = DEPLOY / "kubernetes"
    old = {file.relative_to(plain): file.read_text() for file in plain.rglob("*.yaml") if "examples" not in file.parts}

    assert new == old


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_helm_lint_warns_of_nothing(values) -> None:
    """Helm finds the chart well made with all these values."""
    findings = helm.lint(CHART, values=values)["messages"]

    assert [one for one in findings if one["severity"] >= WARNING] == []


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_knows_every_field_of_the_rendered_objects(values, tmp_path) -> None:
    """The values lead to valid objects, except a ScaledObject, which has no schema here."""
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(body for (kind, _), body in objects(values).items() if kind != "ScaledObject"))
    assert kubernetes_complaints(file) == ""


@pytest.mark.parametrize(("place", "values"), WRONG.items())
def test_wrong_values_are_refused_by_their_name(place, values) -> None:
    """The chart's schema knows every value, so a misspelt one is no silent default."""
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=place):
        chart.render(values, name=RELEASE)


def daemon_of(values: dict) -> tuple[dict, dict[str, str]]:
    """Return the daemon's pod, and the variables of its container."""
    pod = objects(values)["DaemonSet", f"{RELEASE}-batchd"]["spec"]["template"]["spec"]
    return pod, {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}


def test_the_daemon_of_a_release_has_the_addresses_that_its_services_lead_to(tmp_path) -> None:
    """The variables of the container win over the configuration, whose text is the user's."""
    values = CASES["scaled workers"]
    texts = objects(values)["ConfigMap", f"{RELEASE}-batchd"]["data"]
    (tmp_path / "batchd.toml").write_text(texts["batchd.toml"])
    pod, environment = daemon_of(values)
    daemon = load_config(tmp_path / "batchd.toml", environment=environment).daemon
    services = [one for (kind, _), one in objects(values).items() if kind == "Service"]
    names = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
    ports = [names.get(port["targetPort"], port["targetPort"]) for one in services for port in one["spec"]["ports"]]

    first = int(daemon.worker_address.rpartition(":")[2])
    assert sorted(ports) == [
        int(daemon.tcp.rpartition(":")[2]),
        *range(first, first + daemon.pool_gateways),
    ]


def test_a_daemon_for_its_own_node_has_neither_keys_nor_ports_for_other_nodes() -> None:
    """A Secret that does not exist would keep the pod from starting."""
    pod, environment = daemon_of(CASES["one host"])

    assert set(environment) == {"BATCHD_HTTP"}
    assert [one["name"] for one in pod["initContainers"]] == ["runtime-directory"]
    assert not [one for one in pod["volumes"] if "secret" in one]
    assert not [name for kind, name in objects(CASES["one host"]) if kind == "Service"]


def test_the_labels_of_the_nodes_are_those_of_the_values() -> None:
    """A null removes the chart's own label."""
    pod, _environment = daemon_of(CASES["everything of the daemon"])

    assert pod["nodeSelector"] == {"gpu": "yes"}
    assert daemon_of({})[0]["nodeSelector"] == {"batchd": "yes"}


def test_worker_hosts_of_a_release_agree_with_its_daemons() -> None:
    """Workers, CPUs, memory and threshold come from one value; gateways from another."""
    made = objects(CASES["scaled workers"])
    name = f"{RELEASE}-batchd-workers"
    [worker] = made["Deployment", name]["spec"]["template"]["spec"]["containers"]
    [trigger] = made["ScaledObject", name]["spec"]["triggers"]
    [to_daemon] = made["NetworkPolicy", name]["spec"]["egress"][0]["ports"]
    from_workers = made["NetworkPolicy", f"{RELEASE}-batchd"]["spec"]["ingress"][1]["ports"]

    assert f"tcp://{name}:7072" in worker["args"]
    assert "--workers=2" in worker["args"]
    assert "--map=/data=/mnt/data" in worker["args"]
    assert worker["resources"]["limits"] == {"cpu": "2", "memory": "700Mi"}
    assert trigger["metadata"]["threshold"] == "2"
    assert to_daemon == {"port": 7072, "endPort": 7074, "protocol": "TCP"}
    assert from_workers == [to_daemon]
    assert "replicas" not in made["Deployment", name]["spec"]


def selectors(body: object) -> list[dict]:
    """Return the labels by which an object, or a part of it, finds pods."""
    if isinstance(body, list):
        return [found for one in body for found in selectors(one)]
    if not isinstance(body, dict):
        return []
    found = [body["matchLabels"]] if "matchLabels" in body else []
    return found + [one for part in body.values() for one in selectors(part)]


def test_two_releases_in_a_namespace_do_not_touch_each_other() -> None:
    """Their objects have other names, and no selector finds pods of the other release."""
    mine, other = (objects({"workers": {"enabled": True}}, release) for release in ("batchd", "batchd-b"))
    by_labels = [one for body in mine.values() for one in selectors(body)]
    by_labels += [body["spec"]["selector"] for (kind, _), body in mine.items() if kind == "Service"]
    pods = [
        body["spec"]["template"]["metadata"]["labels"] for body in other.values() if "template" in body.get("spec", {})
    ]
    of_release = [one for one in by_labels if "app.kubernetes.io/name" in one]

    assert not set(mine) & set(other)
    assert len(pods) == 2
    assert len(of_release) >= 8
    assert [one for one in of_release for pod in pods if one.items() <= pod.items()] == []


def test_helm_says_what_is_left_to_do() -> None:
    """The notes name the Secrets, the labels and the addresses of this release."""
    notes = rendered({"workers": {"enabled": True}})["NOTES.txt"]
    alone = rendered(CASES["one host"])["NOTES.txt"]

    assert "kubectl -n ml create secret generic batchd-keys" in notes
    assert "kubectl -n ml create secret generic batchd-pool" in notes
    assert "kubectl label node NODE batchd=yes" in notes
    assert f"tcp://{RELEASE}-batchd.ml:7070" in notes
    assert "secret" not in alone.lower()
    assert "tcp://" not in alone


def test_the_chart_is_packaged_with_the_version_of_batchd(tmp_path) -> None:
    """Its image has that tag, if the values name no other."""
    package = Path(helm.package(CHART, destination=tmp_path))

    assert package.name == f"batchd-{batchd.__version__}.tgz"
    assert f"image: batchd:{batchd.__version__}\n" in rendered({})["daemon.yaml"]
