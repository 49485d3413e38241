"""A machine with a real systemd: Debian in a container, with batchd installed from its wheels.

For ``make test-systemd``.

    build/systemd/base    what debootstrap makes; made once
    build/systemd/root    Python's packages, wheels, units, photographs and test programs

The container runs on an overlay in memory, so all changes of a test disappear with it, and the
next run finds the same machine.

Invariant: nothing of it outlives ``close``: the kernel ends all processes of a container with its
first process.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from support.images import write_photos
from support.kernel import children_of
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "systemd"
PACKAGES = "systemd,systemd-sysv,dbus,python3"
PYTHON = "3.11"
"""The Python version of Debian 12."""
USER = "alice"
"""The user of a trainer, a member of the daemon's group."""
BOOT_S = 120.0
COMMAND_S = 180.0
CONFIG = """
[daemon]
workers = 2
memory = "64MiB"

[streams.photos]
batch_size = 4
shuffle = false
source = { type = "folder", path = "/srv/photos" }
pipeline = [{ op = "decode" }, { op = "resize", size = [32, 32] }]
"""
CONFIG_FILE = "/etc/batchd/batchd.toml"
"""The configuration that the daemon serves unless a test uses another one."""
_NEEDED = {"systemd-nspawn": "systemd-container", "debootstrap": "debootstrap", "nsenter": "util-linux"}
_SCRIPT = "#!/usr/bin/python3 -P\nfrom batchd.cli.main import main\n\nmain()\n"
_TRAINER = '''for options; do :; done # the last word of the command that the tests' host would run
exec env PYTHONPATH=/opt/tests /usr/bin/python3 /opt/tests/support/trainer_program.py "$options"'''


class MachineUnavailable(Exception):  # noqa: N818  it is why tests are skipped
    """No such machine can run here; the text gives the reason."""


def why_unavailable() -> str | None:
    """Return what is missing for a machine, or None if it can run."""
    if os.geteuid() != 0:
        return "only root can boot a container"
    missing = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}"
    if not list((ROOT / "dist").glob("batchd-*.whl")):
        return "needs the wheels in dist/: make wheels"
    return None


def build_root() -> Path:
    """Make the missing files of the machine, and install the present wheels and units there."""
    base, root = FOLDER / "base", FOLDER / "root"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        _bootstrap(base)
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = FOLDER / "root.of"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(root, ignore_errors=True)
        _run("cp", "-a", str(base), str(root))
        _install(root, "batchd")
        _run("chroot", str(root), "useradd", "--create-home", USER)
        write_photos(root / "srv/photos", {"cat": 20, "dog": 20}, height=72, width=96)
        stamp.write_text(wanted)
    _install(root, "--no-deps", *map(str, (ROOT / "dist").glob("batchd*.whl")))
    _copy_files(root)
    return root


def _bootstrap(base: Path) -> None:
    """Make a small Debian. An unfinished one has another name, and is made again."""
    unfinished = base.with_name("base.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(unfinished))
    (unfinished / "etc/machine-id").write_text("")
    unfinished.rename(base)


def _install(root: Path, *what: str) -> None:
    """Install packages unchanged for the machine's Python, which differs from this one."""
    options = ["--quiet", "--upgrade", "--target", str(root / "opt/batchd"), "--find-links", str(ROOT / "dist")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    _run(*pip, *options, "--python-version", PYTHON, "--only-binary", ":all:", *what)


def _copy_files(root: Path) -> None:
    """Put the units and all other files where a package would."""
    places = {
        "deploy/batchd.service": "usr/lib/systemd/system/batchd.service",
        "deploy/batchd@.service": "usr/lib/systemd/system/batchd@.service",
        "deploy/batchd.sysusers": "usr/lib/sysusers.d/batchd.conf",
        "deploy/batchd.tmpfiles": "usr/lib/tmpfiles.d/batchd.conf",
    }
    for source, place in places.items():
        target = root / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, target)
    (root / "usr/lib/python3/dist-packages/batchd.pth").write_text("/opt/batchd\n")
    script = root / "usr/bin/batchd"
    script.write_text(_SCRIPT)
    script.chmod(0o755)
    programs = root / "opt/tests/support"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("trainer_program.py", "seen.py"):
        shutil.copyfile(ROOT / "tests/support" / name, programs / name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineUnavailable(
            f"{' '.join(command[:3])} … failed: {done.stderr.strip()[-2000:] or done.stdout[-2000:]}"
        )


class Machine:
    """A container that has booted. ``run`` runs commands in it as root."""

    def __init__(self, root: Path) -> None:
        self._log = (FOLDER / "console").open("wb")
        command = ["setpriv", "--pdeathsig", "KILL", "systemd-nspawn", "--quiet", "-D", str(root)]
        command += [f"--machine=batchd-test-{os.getpid()}", "--boot"]
        self._nspawn = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                *command,
                "--volatile=overlay",
                "--register=no",
                "--keep-unit",
                "--private-network",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"]},  # without the marks of the leak check
        )
        self._enter: list[str] = []

    def boot(self) -> Self:
        """Wait until the machine has started all its units."""
        wait_until(self._has_booted, f"the machine has booted (see {FOLDER / 'console'})", BOOT_S, every_s=0.2)
        self.run("systemctl", "start", "systemd-tmpfiles-setup.service")
        self.run("usermod", "-aG", "batchd", USER)
        return self

    def _has_booted(self) -> bool:
        """Find its first process, which changes at the start, and ask it."""
        if self._nspawn.poll() is not None:
            console = (FOLDER / "console").read_text(errors="replace")
            raise MachineUnavailable(f"systemd-nspawn ended with status {self._nspawn.returncode}: {console[-500:]}")
        leader = max(children_of(self._nspawn.pid), default=None)
        if leader is None:
            return False
        self._enter = ["nsenter", "-t", str(leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        return self.run("systemctl", "is-system-running", check=False).strip() in {"running", "degraded"}

    def close(self) -> None:
        """Kill all its processes at once."""
        for leader in children_of(self._nspawn.pid):
            os.kill(leader, signal.SIGKILL)
        try:
            self._nspawn.wait(10)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
        self._log.close()

    # --- what tests do with it --------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, text: str | None = None) -> str:
        """Run a command and return its output with its errors. ``text`` is its input."""
        done = subprocess.run(
            [*self._enter, *command],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )
        assert not check or done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def succeeds(self, *command: str) -> bool:
        """Return whether a command exits with status 0."""
        return self.run("sh", "-c", '"$@" >&2 && echo fine', "sh", *command, check=False).endswith("fine\n")

    def write(self, path: str, text: str) -> None:
        """Write a file and create its folder."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'cat > "$1"', "sh", path, text=text)

    def signal(self, pid: str, name: str) -> None:
        """Send a signal to a process of the machine."""
        self.run("sh", "-c", f"kill -{name} {pid}")

    def lives(self, pid: str) -> bool:
        """Return whether such a process exists."""
        return self.succeeds("test", "-d", f"/proc/{pid}")

    def children(self, pid: str) -> set[str]:
        """Return the child processes of a process, or none if it has ended."""
        return set(self.run("sh", "-c", f"cat /proc/{pid}/task/{pid}/children 2> /dev/null", check=False).split())

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--property", name, "--value", unit).strip()

    def journal(self, unit: str) -> list[dict[str, Any]]:
        """Return the log of a unit since boot, with systemd's lines about it."""
        lines = self.run("journalctl", "--unit", unit, "--output", "json", "--all", "--quiet").splitlines()
        return [json.loads(line) for line in lines]

    def said(self, unit: str) -> str:
        """Return the log as text."""
        return "\n".join(str(entry.get("MESSAGE", "")) for entry in self.journal(unit))

    def trainer(self, address: str, stream: str = "photos", user: str = USER, **connect: Any) -> TrainerProcess:
        """Start a trainer in the machine, as a user in the daemon's group."""
        through = [*self._enter, "runuser", "-u", user, "--", "sh", "-c", _TRAINER, "trainer"]
        return TrainerProcess(address, stream, connect=connect, through=through)
