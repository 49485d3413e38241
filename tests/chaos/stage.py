"""The place of a chaos run: photographs, keys, a small disk for caches, daemon, worker hosts.

    photos   random crops, read by whole trainers and by ranks, locally and over TCP
    cached   the same files through a cache on a disk that is too small, with checksums
    extra    reloads add and remove it
    own, theirs
             trainers define them, of this host and with a key; both want most of the memory for
             such streams

Invariant: no reload changes a byte of a batch, so the content of each position is known from the
start.
"""

import errno
import os
import random
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from batchd.runtime.keys import KeyDirectory
from batchd_wire.keys import Role, connection_file_text
from support.daemon_process import DaemonProcess
from support.expected import Expected
from support.fake_gateway import WorkerHostProcess
from support.images import write_photos
from support.mounts import small_file_system
from support.network import free_port
from support.settings import folder_stream, write_settings

STREAMS = ("photos", "cached", "extra")
DEFINED = ("own", "theirs")
PHOTOS = {"cat": 30, "dog": 30, "owl": 20, "yak": 15}
"""95 of them: the last batch of an epoch has 3 of 4, so that three ranks may share it."""
CONNECT_TIMEOUT_S = 60.0
"""A trainer may start without a daemon, and the next one may be killed before it connects."""
DEFINED_MEMORY, DEFINED_MEMORY_OF_ONE = "512KiB", "400KiB"
DISK = "384k"
"""The cached photographs alone fill it."""
BALLAST_PART_BYTES = 1 << 14


class Stage:
    """The daemon, and its files and hosts. ``stack`` ends all of it."""

    def __init__(self, folder: Path, stack: ExitStack, chance: random.Random) -> None:
        self._chance = chance
        self._photos = folder / "photos"
        write_photos(self._photos, PHOTOS, height=48, width=64)
        self.has_small_disk = os.geteuid() == 0
        self._disk = folder / "disk"
        if self.has_small_disk:
            stack.enter_context(small_file_system(self._disk, size=DISK))
        else:
            self._disk.mkdir()
        keys = KeyDirectory(folder / "keys")
        keys.make_daemon_key()
        self.key, self._worker_key = (
            self._key_file(folder, keys, Role.TRAINER),
            self._key_file(folder, keys, Role.WORKER),
        )
        trainers_port, self._workers_port = free_port(), free_port()
        options = {"tcp": f"127.0.0.1:{trainers_port}", "keys_dir": str(keys.path), "http": "127.0.0.1:0"}
        options["worker_address"] = f"127.0.0.1:{self._workers_port}"
        define = {"who": [f"user:{os.geteuid()}", f"key:{Role.TRAINER}"], "roots": [str(self._photos)]}
        options |= {"define": define, "derive_memory": DEFINED_MEMORY}
        self._settings = {**options, "cache_dir": str(self._disk), "sample_timeout_s": 10.0}
        self.tables = {
            name: folder_stream(self._photos, batch_size=size, memory=DEFINED_MEMORY_OF_ONE, seed=size)
            for name, size in zip(DEFINED, (4, 6), strict=True)
        }
        """Of the streams that trainers define."""
        self.daemon = DaemonProcess(folder, self._streams(has_extra=True), **self._settings)
        stack.callback(self.daemon.close)
        self.daemon.log_level = "info"
        self._expected = {name: Expected(self.daemon.config, name) for name in STREAMS}
        defined = write_settings(folder / "defined.toml", self.tables, {})
        self._expected |= {name: Expected(defined, name) for name in DEFINED}
        for expected in self._expected.values():
            stack.callback(expected.close)

    def expected(self, stream: str) -> Expected:
        """Return the expected batches of a stream."""
        return self._expected[stream]

    def connect(self, *, remote: bool) -> dict[str, Any]:
        """Return how a trainer connects."""
        options = {"connect_timeout_s": CONNECT_TIMEOUT_S}
        if remote:
            return {**options, "address": self.daemon.tcp_address, "key": str(self.key)}
        return {**options, "address": self.daemon.address}

    def start_host(self) -> WorkerHostProcess:
        """Start a worker host of one worker; without a daemon it waits for one."""
        address, key = f"tcp://127.0.0.1:{self._workers_port}", str(self._worker_key)
        return WorkerHostProcess(self.daemon.folder, address, "--workers", "1", "--key", key)

    # --- reloads ----------------------------------------------------------------------------------

    def change_configuration(self) -> None:
        """Write another configuration with the same bytes of ``photos`` and ``cached``."""
        streams = self._streams(has_extra=self._chance.random() < 0.5)
        for stream in streams.values():
            stream["window"] = self._chance.randrange(2, 6)
        streams["photos"]["memory"] = self._chance.choice(["1MiB", "2MiB"])
        self._write(streams, workers=self._chance.randrange(1, 4))

    def spoil_configuration(self) -> str:
        """Write a configuration that every daemon rejects; return the old one."""
        before = self.daemon.config.read_text()
        self._write({"photos": folder_stream(self._photos, batch_size=0)}, workers=2)
        return before

    def restore_configuration(self, text: str) -> None:
        """Write the old configuration."""
        self._replace(text)

    def _write(self, streams: dict[str, dict[str, Any]], workers: int) -> None:
        daemon = {"runtime_dir": str(self.daemon.runtime_dir), "memory": "64MiB", **self._settings, "workers": workers}
        self._replace(write_settings(self.daemon.folder / "next.toml", streams, daemon).read_text())

    def _replace(self, text: str) -> None:
        """Replace the file in one step, as a daemon may be starting just now."""
        file = self.daemon.folder / "next.toml"
        file.write_text(text)
        file.replace(self.daemon.config)

    def _streams(self, *, has_extra: bool) -> dict[str, dict[str, Any]]:
        cache = {"cache": "encoded", "cache_dir": str(self._disk), "cache_size": "1MiB"}
        streams = {
            "photos": folder_stream(self._photos, batch_size=4, memory="1MiB"),
            "cached": folder_stream(self._photos, batch_size=5, memory="1MiB", seed=7, verify=True, **cache),
        }
        if has_extra:
            streams["extra"] = folder_stream(self._photos, batch_size=3, memory="512KiB", seed=9)
        return streams

    def _key_file(self, folder: Path, keys: KeyDirectory, role: Role) -> Path:
        file = folder / f"{role}.key"
        file.touch(0o600)
        file.write_text(connection_file_text(keys.new(str(role), None, role)))
        return file

    # --- the disk ---------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """Fill the caches' disk completely."""
        with (self._disk / "ballast").open("wb", buffering=0) as file:
            size = BALLAST_PART_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free_disk(self) -> None:
        """Free the disk again."""
        with suppress(FileNotFoundError):
            (self._disk / "ballast").unlink()
