"""Tools that check ``deploy/``, and that not every machine has."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.roots import TREE

DEPLOY = TREE / "deploy"
TOOLS = Path(sys.executable).parent
"""Where pip puts the tools of the group ``packages``."""


def complaints(*command: str | Path) -> str:
    """Return a tool's complaints, or an empty text."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, check=False)
    return f"{done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def need(tool: str, remedy: str) -> None:
    """Skip the test with the remedy if a tool is not installed."""
    if not shutil.which(tool, path=f"{TOOLS}:/usr/bin:/usr/local/bin"):
        pytest.skip(f"{tool} is not installed ({remedy})")


def kubernetes_complaints(manifest: Path) -> str:
    """Return what Kubernetes' schemas find wrong with a manifest, such as an unknown field."""
    if not find_spec("kubernetes_validate"):
        pytest.skip("kubernetes-validate is not installed (pip install kubernetes-validate)")
    return complaints(TOOLS / "kubernetes-validate", "--strict", manifest)
