"""What a purge removes, of `make uninstall` and of the Debian package.

What the installation made, unless it is used.
"""

import os
import socket
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3]
DATA = ("etc/batchd", "var/lib/batchd", "var/cache/batchd", "run/batchd")
PREFIXES = {"make": "/opt/a", "package": "/usr"}


class Machine:
    """A folder that looks like a machine with batchd in it; nothing outside is touched."""

    def __init__(self, root: Path, way: str) -> None:
        self.root = root
        self.way = way

    def install(self, prefix: str, found: tuple[str, ...] = ()) -> None:
        """Put the files that an installation has, and its data."""
        self.write("etc/batchd/batchd.toml")
        for place in DATA[1:]:
            self.write(f"{place}/kept")
        lines = [f"prefix {prefix}", *(f"found {self.root / place}" for place in found)]
        self.write(f"etc/batchd/installations/{prefix[1:].replace('/', '%')}", "\n".join(lines) + "\n")
        if self.way == "make" or prefix != "/usr":
            folder = "usr/local/lib" if prefix == "/usr/local" else "etc"
            unit = f"{folder}/systemd/system/batchd.service"
            self.write(unit, f"ExecStart={prefix}/bin/batchd serve\n")
            self.write(f"{prefix[1:]}/lib/batchd/manifest", f"file {prefix}/bin/batchd\nfile /{unit}\n")
            self.write(f"{prefix[1:]}/bin/batchd")

    def write(self, place: str, text: str = "kept") -> None:
        (self.root / place).parent.mkdir(parents=True, exist_ok=True)
        (self.root / place).write_text(text)

    def purge(self, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run what `make uninstall PURGE=1` or `dpkg --purge` runs, below the folder."""
        commands = {
            "make": [TREE / "deploy/install.sh", "uninstall"],
            "package": ["sh", TREE / "deploy/debian/postrm", "purge"],
        }
        below = {"DESTDIR": str(self.root), "DPKG_ROOT": str(self.root), "PREFIX": PREFIXES[self.way], "PURGE": "1"}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), **below, **settings}
        return subprocess.run(commands[self.way], env=environment, capture_output=True, text=True, check=False)

    def left(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture(params=["make", "package"])
def machine(request, tmp_path) -> Machine:
    return Machine(tmp_path, request.param)


def test_a_purge_lists_and_removes_what_the_installation_made(machine) -> None:
    """Nothing stays, and each place stands in the output."""
    machine.install(PREFIXES[machine.way])
    machine.write("etc/batchd/second.toml")
    machine.write("var/cache/batchd-second/index")
    done = machine.purge()

    assert done.returncode == 0, done.stderr
    assert machine.left() == set()
    assert all(str(machine.root / place) in done.stdout for place in (*DATA, "var/cache/batchd-second"))


def test_what_was_there_before_stays(machine) -> None:
    """The output says so."""
    machine.install(PREFIXES[machine.way], found=("var/cache/batchd",))
    done = machine.purge()

    assert machine.left() == {"var/cache/batchd/kept"}
    assert "as it was there before" in done.stdout + done.stderr


@pytest.mark.parametrize("other", ["/usr/local", "/opt/b"])
def test_a_purge_is_refused_while_another_installation_uses_the_same_data(machine, other) -> None:
    """Its files stay too, as the refusal comes before any change."""
    machine.install(PREFIXES[machine.way])
    machine.install(other)
    before = machine.left()
    done = machine.purge()

    assert done.returncode == 1
    assert other in done.stderr
    assert "nothing is purged" in done.stderr
    assert machine.left() == before


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("place", ["run/batchd", "var/cache/batchd"])
def test_a_purge_is_refused_while_a_daemon_uses_the_data(machine, place) -> None:
    """A socket that is bound there shows it, and so does an open file."""
    machine.install(PREFIXES[machine.way])
    before = machine.left()
    if place == "run/batchd":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(machine.root / place / "batchd.sock"))
            done = machine.purge()
    else:
        with (machine.root / place / "kept").open():
            done = machine.purge()

    assert done.returncode == 1
    assert str(machine.root / place) in done.stderr
    assert machine.left() == before


def test_a_prefix_without_an_installation_purges_nothing(tmp_path) -> None:
    """A wrong PREFIX is not a reason to remove the data of the right one."""
    machine = Machine(tmp_path, "make")
    machine.install("/opt/a")
    before = machine.left()
    done = machine.purge(PREFIX="/opt/none")

    assert done.returncode == 1
    assert "give it here too" in done.stderr
    assert machine.left() == before


def test_an_uninstalled_prefix_leaves_the_units_of_another(tmp_path) -> None:
    """Both put them into /etc, and the later one won."""
    machine = Machine(tmp_path, "make")
    machine.install("/opt/a")
    machine.install("/opt/b")
    done = machine.purge(PURGE="")

    assert done.returncode == 0, done.stderr
    assert "opt/a/bin/batchd" not in machine.left()
    assert {"opt/b/bin/batchd", "etc/systemd/system/batchd.service"} <= machine.left()
