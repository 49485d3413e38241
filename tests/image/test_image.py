"""The image of ``deploy/Dockerfile``, built and run by podman on a base of debootstrap.

`make test-image` runs this as root, with podman, runc and debootstrap. The build installs packages
of Debian; all else is offline. A test fails with the reason where the machine lacks something.
"""

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchd
from support.commands import batchd as command
from support.daemon_process import clean_environment
from support.roots import DEBIAN, TREE, collect_wheels, need_debian
from support.waiting import PATIENCE_S, wait_until

BASE, IMAGE = "localhost/base-of-test", "localhost/batchd-of-test"
TOOLS = ("podman", "runc", "debootstrap")
HEADERS = "gcc libc6-dev libjpeg62-turbo-dev python3-dev"
"""The Dockerfile's packages, and the headers that its usual base has and Debian's Python lacks."""
FILES_MAX, PROCESSES_MAX = 4096, 2048
BUILD_PATIENCE_S = 1800
CONFIGURATION = """[daemon]
memory = "64MiB"
workers = 1
[streams.photos]
source = { type = "folder", path = "/data" }
batch_size = 4
pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
ENGINE = """[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{folder}/tmp"
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
"""


class Podman:
    """Podman with storage of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        files = min(FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        (folder / "engine.conf").write_text(ENGINE.format(folder=folder, files=files, processes=PROCESSES_MAX))
        self._folder = folder
        self._environment = clean_environment() | {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "engine.conf"),
        }

    def __call__(self, *words: str | Path, status: int = 0) -> str:
        """Run podman; return its output, with standard error where a failure is expected."""
        done = subprocess.run(
            ["podman", *words],
            cwd=TREE,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=BUILD_PATIENCE_S,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + (done.stderr if status else "")

    def build(self, *arguments: str, status: int = 0) -> str:
        """Build the image without a package index, with further build arguments."""
        given = [
            f"--build-arg={one}" for one in (f"BASE={BASE}", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/wheels", *arguments)
        ]
        words = ("--format", "docker", "--isolation", "chroot", *given, "-f", "deploy/Dockerfile", "-t", IMAGE, ".")
        return self("build", *words, status=status)

    def close(self) -> None:
        """Remove all containers and images."""
        self("rm", "--all", "--force", "--time", "0")
        subprocess.run(["umount", "--lazy", self._folder / "images/overlay"], check=False)
        shutil.rmtree(self._folder)


@pytest.fixture(scope="module")
def podman(tmp_path_factory) -> Iterator[Podman]:
    """Make a base image; fail where this machine cannot."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    assert not missing, f"apt install {' '.join(missing)}"
    try:
        need_debian()
        collect_wheels()
    except pytest.skip.Exception as reason:
        pytest.fail(str(reason))
    folder = tmp_path_factory.mktemp("podman")
    podman = Podman(folder)
    subprocess.run(["tar", "--create", "--directory", DEBIAN, "--file", folder / "base.tar", "."], check=True)
    podman("import", folder / "base.tar", BASE)
    yield podman
    podman.close()


@pytest.fixture(scope="module")
def image(podman) -> Podman:
    podman.build(f"JPEG_BUILD={HEADERS}")
    return podman


def run(*words: str | Path) -> list[str | Path]:
    """Return the words that run the image as docs/docker.md does, with a root that is read-only.

    There is no systemd here for a timer, so that a test runs the health check itself.
    """
    return ["run", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--health-interval", "disable", *words]


def shell(podman: Podman, script: str) -> str:
    """Run a line of shell in a new container."""
    return podman(*run("--rm", "--entrypoint", "sh", IMAGE, "-ec", script))


def test_the_image_has_the_version_and_the_compiled_parts(image) -> None:
    """The entry point is the command; crops are decoded alone."""
    program = "from batchd.data.pipeline import _pixels, _sound, _words; import batchd.data.storage._rows"
    decoders = "from batchd.data.pipeline.image.decode import decoder_versions; print(decoder_versions())"

    assert image(*run("--rm", IMAGE, "--version")) == f"batchd {batchd.__version__}\n"
    assert "decodes crops alone" in shell(image, f"/opt/batchd/bin/python -c '{program}; {decoders}'")


def test_a_build_without_the_compiled_parts_fails_if_they_were_asked_for(podman) -> None:
    """Without a compiler pip builds a slower package, and says nothing."""
    assert "No module named 'batchd.data.pipeline._jpeg'" in podman.build("JPEG_BUILD=adduser", status=1)


def test_the_image_runs_as_a_user_without_privileges(image) -> None:
    """The user has no capability, and writes to the runtime directory, the cache and /tmp only."""
    facts = shell(image, "id -u; id -g; grep CapEff /proc/self/status; stat -c '%U %G %a' /run/batchd").splitlines()

    assert facts == ["7070", "7070", "CapEff:\t0000000000000000", "batchd batchd 750"]
    shell(image, "touch /run/batchd/x /tmp/x")
    shell(image, "for place in /opt/batchd /etc/batchd /usr/local/bin; do ! touch $place/x 2>/dev/null; done")
    writable = run("--rm", "--read-only=false", "--entrypoint", "sh", IMAGE, "-ec", "! touch /opt/batchd/x 2>&1")
    assert "Permission denied" in image(*writable)


@pytest.fixture
def daemon(image, photos, tmp_path, daemons_folder) -> Iterator[tuple[str, str]]:
    """Run the daemon in a container; return its name and the address outside."""
    shared, config, name = daemons_folder / "of-image", tmp_path / "batchd.toml", "batchd-of-test"
    shared.mkdir(mode=0o2750)
    shutil.chown(shared, 7070, 7070)
    config.write_text(CONFIGURATION)
    for path in (tmp_path, *tmp_path.parents[:2], photos, photos.parent):
        path.chmod(0o755)
    volumes = {
        config: "/etc/batchd/batchd.toml:ro",
        photos: "/data:ro",
        shared: "/run/batchd",
        "cache": "/var/cache/batchd",
    }
    places = [f"--volume={outside}:{inside}" for outside, inside in volumes.items()]
    image(*run("--detach", "--memory", "1g", "--name", name, *places, IMAGE))
    yield name, f"ipc://{shared}"
    image("rm", "--force", "--time", "0", name)
    shutil.rmtree(shared)


def test_the_image_serves_and_drains(image, daemon, tmp_path) -> None:
    """A trainer outside reads over a shared directory; `podman stop` ends it with status 0."""
    name, address = daemon
    wait_until((Path(address.removeprefix("ipc://")) / "batchd.sock").exists, "the daemon in the image serves")

    assert "4 samples" in command("peek", "photos", "-o", tmp_path / "sheet.png", address=address).stdout
    image("healthcheck", "run", name)
    image("stop", "--time", str(int(PATIENCE_S)), name)
    [state] = json.loads(image("inspect", name, "--format", "[{{json .State}}]"))
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)


def test_the_health_check_fails_without_a_daemon(image) -> None:
    """Docker restarts such a container; Kubernetes has probes of its own."""
    image(*run("--detach", "--name", "without", "--entrypoint", "sleep", IMAGE, "3600"))

    image("healthcheck", "run", "without", status=1)
    image("rm", "--force", "--time", "0", "without")


def test_the_demo_runs_from_the_image(image) -> None:
    """No file is needed besides the image."""
    assert "8 of 8" in image(*run("--rm", IMAGE, "demo", "--epochs", "1", "--folder", "/tmp/demo"))
