"""The peers' virtual environments under ``build/peers``: what is in each, and how they are made.

Runs in the runner.

Pinned is what was measured; what these packages need besides, pip chooses.
"""

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "peers"
MAKE_TIMEOUT_S = 1200
CV2 = "opencv-python-headless==5.0.0.93"
NUMPY = "numpy==2.4.6"
TORCH = "torch==2.13.0"
OURS = "batchd"
"""The environment of the project itself, in which the runner runs too.

What is in it that counts is named here.
"""
OUR_PACKAGES = ("batchd", "numpy", "opencv-python-headless", "simplejpeg", "pyzmq", "msgpack")


class Environment(NamedTuple):
    """What pip installs.

    ``alone`` afterwards and without what it needs; ``wants`` is what must be on the machine for
    that.
    """

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    wants: str = ""


ENVIRONMENTS = {
    "torch": Environment((TORCH, NUMPY, CV2, "pillow==13.0.0"), ("torchvision==0.28.0",)),
    "recipes": Environment(
        (
            TORCH,
            NUMPY,
            "pillow==12.3.0",  # with 13, timm's posterize fails at the magnitude 10
            "huggingface-hub==2.4.0",
            "msgpack==1.2.4",
            "pyyaml==6.0.4",
            "pyzmq==27.3.0",
            "safetensors==0.8.0",
        ),
        ("torchvision==0.28.0", "timm==1.0.31"),
    ),
    "structure": Environment(
        (TORCH, NUMPY, CV2, "pillow==13.0.0", "albumentations==2.0.8", "pycocotools==2.0.11"), ("torchvision==0.28.0",)
    ),
    "media": Environment(
        # later wheels of torchcodec are for CUDA
        (TORCH, NUMPY, "torchcodec==0.12.0", "soundfile==0.14.0", "lhotse==1.33.0", "urllib3==2.8.0"),
        ("torchaudio==2.11.1",),
    ),
    "chats": Environment(
        (NUMPY, "transformers==5.24.0", "datasets==5.2.0", "tokenizers==0.23.3", "jinja2==3.1.6", "pyarrow==26.0.1")
    ),
    "ultralytics": Environment(
        (
            TORCH,
            NUMPY,
            CV2,
            "pillow==13.0.0",
            "matplotlib==3.11.2",
            "polars==2.1.0",
            "psutil==7.2.2",
            "pyyaml==6.0.4",
            "requests==2.34.2",
            "scipy==1.17.1",
        ),
        ("torchvision==0.28.0", "ultralytics==8.4.190", "ultralytics-thop==2.2.3"),
    ),
    "tensorflow": Environment(("tensorflow-cpu==2.21.0",)),
    "grain": Environment(("grain==0.2.18", NUMPY, CV2)),
    "spdl": Environment(("spdl==0.8.0", NUMPY, CV2)),
    "ffcv": Environment(
        (
            TORCH,
            "numpy==1.26.4",
            "numba==0.68.1",
            "opencv-python-headless==4.11.0.86",
            "pillow==13.0.0",
            "setuptools==84.2.1",
            "wheel==0.48.0",
            "assertpy==1.1",
            "fastargs==1.2.0",
            "psutil==7.2.2",
            "pytorch-pfn-extras==0.9.0",
            "terminaltables==3.1.10",
            "tqdm==4.70.1",
        ),
        ("ffcv==1.0.2",),
        "a C++ compiler, pkg-config, libopencv-dev and libturbojpeg0-dev",
    ),
    "dali": Environment(("nvidia-dali-cuda120==2.4.0", NUMPY)),
    "lerobot": Environment(("lerobot==0.4.4", "torchcodec==0.10.0")),
    "ray": Environment(("ray[data]==2.60.0", NUMPY, CV2)),
    "tensorsocket": Environment(("tensorsocket==0.0.5", TORCH, NUMPY, CV2)),
}
OF_PAGES = {"dali-torch": Environment((*ENVIRONMENTS["dali"].packages, TORCH))}
"""What no side is measured in: DALI with its iterator for PyTorch, as docs/moving uses it."""
CONFINED = {"ray"}
"""Those whose processes run in namespaces of their own: a network with a loopback alone, and an
end that takes all processes along.

Ray listens on every address of its machine, and leaves processes behind when it is killed.
"""
NAMESPACES = (
    *("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"),
    *("sh", "-euc"),
    'ip link set lo up; mkdir -p /tmp/ray; mount -t tmpfs ray /tmp/ray; mount -t tmpfs ray /dev/shm; "$0" "$@" || exit',
)


def python(name: str) -> str:
    """The interpreter of an environment."""
    return sys.executable if name == OURS else str(BUILD / name / "bin" / "python")


def command(name: str) -> list[str]:
    """How a script is started in an environment, without the script."""
    return [*(NAMESPACES if name in CONFINED else ()), python(name)]


def make(names: Iterable[str]) -> dict[str, str]:
    """Make those that are not there yet; gives why, by name, for each that cannot be made."""
    failures = {}
    for name in sorted(set(names) - {OURS}):
        environment = (ENVIRONMENTS | OF_PAGES)[name]
        stamp, pins = BUILD / name / ".ready", f"{environment}\n"
        if not stamp.exists() or stamp.read_text() != pins:
            print(f"making build/peers/{name}", flush=True)
            reason = _install(name, environment)
            if reason:
                failures[name] = reason
                print(f"{name} cannot be installed here: {reason}", flush=True)
                continue
            stamp.write_text(pins)
        print(f"{name}: {', '.join(environment.packages + environment.alone)}", flush=True)
    return failures


def ours() -> str:
    """What is installed where batchd runs."""
    return ", ".join(f"{name}=={version(name)}" for name in OUR_PACKAGES)


def _install(name: str, environment: Environment) -> str:
    """Why it could not be made; nothing where it could."""
    pip = [python(name), "-m", "pip", "install", "-q"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(BUILD / name)], [*pip, *environment.packages]]
    if environment.alone:
        commands.append([*pip, "--no-deps", "--no-build-isolation", *environment.alone])
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not done within {MAKE_TIMEOUT_S} s"
        if done.returncode:
            errors = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
            wants = f" (it wants {environment.wants})" if environment.wants else ""
            return (errors[0] if errors else f"exit status {done.returncode}") + wants
    return ""
