"""The demo of the pool as a process, and its output. For tests of processes and of Ray."""

import subprocess
import sys
from pathlib import Path

from support.daemon_process import clean_environment
from support.images import write_photos
from support.waiting import PATIENCE_S

DEMO = Path(__file__).parents[2] / "examples" / "demo_cluster.py"


def start_demo(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """Start the demo in a folder with some photographs, and nothing else."""
    write_photos(folder / "photos", {"a": 32, "b": 32})
    return subprocess.Popen(
        [sys.executable, str(DEMO), "--data", "photos", "--seconds", "0.5", *options],
        cwd=folder,
        env=clean_environment() | {"TMPDIR": str(folder), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_demo(folder: Path, *options: str) -> str:
    """Run the demo to its end, check its findings and leftovers, and return its output."""
    with start_demo(folder, *options) as demo:
        try:
            said, complained = demo.communicate(timeout=2 * PATIENCE_S)
        finally:
            demo.kill()
    assert demo.returncode == 0, said + complained
    remote_workers, digests = {}, []
    for line in said.splitlines():
        words = line.split()
        if line.startswith(("before", "with two nodes", "one node killed")):
            remote_workers[" ".join(words[:-3])] = int(words[-2])
        elif line.endswith("..."):
            digests.append(words[-1])
    assert remote_workers == {"before": 0, "with two nodes": 4, "one node killed": 2}
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert "The same bytes" in said
    assert [path.name for path in folder.iterdir()] == ["photos"]
    return said
