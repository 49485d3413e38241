"""Keys that systemd hands to the daemon. DAEMON process and CLI.

    LoadCredential=keys:/etc/batchd/keys

    /etc/batchd/keys/             root's           $CREDENTIALS_DIRECTORY/        the service's, in memory, read-only
        daemon.key                      ->             keys_daemon.key
        trainers/NAME.key               ->             keys_trainers_NAME.key

So the daemon's secret is in no directory that the daemon, or a function of somebody's in one of its
workers, could write to. They are copies, made when the service starts: what ``batchd keys`` changes
counts for the next start. Source: systemd.exec(5).

Invariant: where there are credentials, nothing else is looked at; keys that were taken out are not
found in another place.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from batchd.config.directories import SYSTEM_KEYS_DIRECTORY, default_keys_dir
from batchd.daemon.tcp.keys import DAEMON_FILE, TRAINERS_FOLDER, KeyDirectory
from batchd.errors import KeysInvalid
from batchd_wire.keys import ANY_ACCESS, GROUP_READS, ConnectionKey

VARIABLE = "CREDENTIALS_DIRECTORY"
PREFIX = "keys_"
TRAINERS_PREFIX = f"{PREFIX}{TRAINERS_FOLDER}_"
RESTART = "systemctl restart batchd"


def open_keys(configured: Path | None) -> KeyDirectory:
    """The keys in the directory that is configured, else those that systemd gave us, else the user's own.

    Raises ``ConfigInvalid`` for a user without a home.
    """
    given = os.environ.get(VARIABLE)
    if configured is None and given:
        return CredentialKeys(Path(given))
    return KeyDirectory((configured or default_keys_dir()).absolute())


class CredentialKeys(KeyDirectory):
    """The copies that systemd made. Whoever would change them is told where to do that."""

    _daemon_file = f"{PREFIX}{DAEMON_FILE}"
    _refused_mode = ANY_ACCESS & ~GROUP_READS
    """Where systemd lets the service read a file by an access list, the group's bits show the most that the list grants."""

    @property
    def advice(self) -> str:
        """What makes a key that is missing."""
        return (
            f"as root, `batchd keys new --name NAME` makes one in {SYSTEM_KEYS_DIRECTORY}, from where the unit takes it "
            f"(LoadCredential=keys:{SYSTEM_KEYS_DIRECTORY}) at the next `{RESTART}`"
        )

    def make_daemon_key(self) -> tuple[str, str]:
        """Refuse."""
        self._refuse()

    def new(self, name: str, streams: frozenset[str] | None = None) -> ConnectionKey:
        """Refuse."""
        self._refuse(name, streams)

    def revoke(self, name: str) -> None:
        """Refuse."""
        self._refuse(name)

    def _refuse(self, *_wanted: object) -> NoReturn:
        raise KeysInvalid(
            f"{self.path} has copies that systemd made; as root, change the keys in {SYSTEM_KEYS_DIRECTORY} and then: {RESTART}"
        )

    @contextmanager
    def _trainers_folder(self, keys: int | None) -> Iterator[int | None]:
        yield keys

    def _files(self, folder: int) -> list[str]:
        return sorted(
            name.removeprefix(TRAINERS_PREFIX) for name in os.listdir(folder) if name.startswith(TRAINERS_PREFIX)
        )

    def _trainer_path(self, file: str) -> Path:
        return self.path / f"{TRAINERS_PREFIX}{file}"
