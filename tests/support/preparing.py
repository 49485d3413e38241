"""``batchd prepare`` as tests call it, and its output."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from support.commands import batchd
from support.daemon_process import clean_environment
from support.settings import folder_stream, write_settings
from support.waiting import PATIENCE_S

SHORTER = [{"op": "decode"}, {"op": "resize", "shorter_side": 24}]
"""Images of different proportions: no batch could hold them."""


def config_in(folder: Path, photos: Path) -> Callable[..., Path]:
    """Write a configuration of one stream over forty photographs."""
    return lambda **changes: write_settings(
        folder / "batchd.toml",
        {"photos": folder_stream(photos, pipeline=SHORTER, **changes)},
        {"workers": 2, "sample_timeout_s": 30},
    )


def prepare(
    config_file: Path, *options: str, status: int = 0, shard_samples: int = 7
) -> "subprocess.CompletedProcess[str]":
    """Run the command into the folder "out" beside the configuration."""
    return batchd(
        *("prepare", "photos", "-c", config_file, "--to", config_file.parent / "out", "--shard-samples", shard_samples),
        *options,
        status=status,
    )


def start(
    config_file: Path, faults: str = "", ledger: Path | None = None, more: tuple[str, ...] = (), **options: Any
) -> "subprocess.Popen[str]":
    """Start the command with faults; with a ledger, each of them happens once."""
    command = ["prepare", "photos", "-c", str(config_file), "--to", str(config_file.parent / "out")]
    environment = clean_environment() | {"BATCHD_FAILPOINTS": faults}
    if ledger:
        environment |= {"BATCHD_FAILPOINTS_LEDGER": str(ledger)}
    return subprocess.Popen(
        [sys.executable, "-m", "batchd", *command, "--shard-samples", "7", *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )


def finish(command: "subprocess.Popen[str]") -> str:
    """Wait until a started command has ended with status 0, and return its output."""
    said = command.communicate(timeout=PATIENCE_S)[0]
    assert command.returncode == 0, said
    return said


def proposed(summary: str) -> dict[str, Any]:
    """Return the source that the summary proposes."""
    source: dict[str, Any] = tomllib.loads(summary.rpartition("serve them:\n")[2])["source"]
    return source


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each shard, by name."""
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.tar"))}


def bad_samples(folder: Path) -> dict[int, tuple[str, str, str]]:
    """Return the samples that were left out: shard, path and reason."""
    rows = [line.split("\t") for line in (folder / "bad.tsv").read_text().splitlines()]
    assert rows[0] == ["shard", "sample", "path", "reason"]
    return {int(row[1]): (row[0], row[2], row[3]) for row in rows[1:]}
