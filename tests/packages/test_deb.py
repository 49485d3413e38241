"""The Debian package: installed, removed and purged by dpkg, in its own Debian, offline."""

import shutil
import subprocess

import pytest

from support.deploy_tools import need
from support.roots import PHOTOS, PYTHON, TREE, WHEELHOUSE, Root, make

OTHERS = {"/etc/.pwd.lock"}
LOGS = ("/var/lib/dpkg/", "/var/log/", "/var/cache/debconf/")
"""Files that dpkg and the tools for users write about themselves."""


@pytest.fixture(scope="module")
def package(root):
    """Build the package from this tree."""
    for tool in ("dpkg-deb", "dpkg-shlibdeps", "readelf"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (apt install dpkg-dev binutils)")
    assert root
    make("deb", f"DEB_PYTHON={PYTHON}", f"WHEELS={WHEELHOUSE}")
    [file] = (TREE / "build").glob("batchd_*.deb")
    return file


@pytest.fixture(scope="module")
def installed(root, package) -> Root:
    """Install the package in a Debian."""
    root.run(f"dpkg -i /mnt/build/{package.name}")
    return root


def left(root: Root) -> set[str]:
    """Return all differences to the Debian before, except dpkg's own files."""
    changed = {path for path in root.changed() if not f"{path}/".startswith(LOGS) and not path.endswith("-")}
    return changed - OTHERS


def test_an_installed_package_works(installed) -> None:
    """The package has its libraries and user; its configuration is valid, and a dpkg conffile."""
    check = "batchd check /etc/batchd/batchd.toml --set streams.photos.source.path=/tmp/photos"

    assert installed.run("batchd --version").startswith("batchd ")
    assert "is fine" in installed.run(f"{PHOTOS} && {check}")
    assert "batchd" in installed.run("getent passwd batchd && getent group batchd")
    assert "/etc/batchd/batchd.toml" in installed.run("dpkg-query -W -f '${Conffiles}' batchd")
    assert installed.run("dpkg --verify batchd") == ""


def test_the_units_of_the_package_name_a_page_that_is_there(installed) -> None:
    """`systemctl help batchd` opens it."""
    (unit,) = installed.run("dpkg -L batchd | grep /batchd.service").split()
    page = installed.run(f"sed -n 's|^Documentation=.*file://||p' {unit}").strip()

    assert page in installed.run("dpkg -L batchd").split()
    assert installed.run(f"head -1 {page}") == "# batchd as a systemd service\n"


def test_the_package_has_a_manual_page_for_the_command(installed) -> None:
    """Debian's `man` finds it."""
    assert '.TH "BATCHD" 1' in installed.run("zcat /usr/share/man/man1/batchd.1.gz")


def test_the_manual_pages_of_the_package_are_well_made(package, tmp_path) -> None:
    """Neither man nor mandoc warns of a page, except that it has no date.

    A date would make other bytes of the same tree.
    """
    need("mandoc", "apt install mandoc")
    need("man", "apt install man-db")
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path], check=True)
    pages = sorted(tmp_path.glob("usr/share/man/man1/*.gz"))
    lint, shown = (
        [subprocess.run([*tool, page], capture_output=True, text=True, check=False) for page in pages]
        for tool in (("mandoc", "-T", "lint", "-W", "warning"), ("man", "--warnings", "-l"))
    )
    found = [line for one in lint for line in one.stdout.splitlines()]

    assert {"batchd.1.gz", "batchd-serve.1.gz", "batchd-keys-new.1.gz"} <= {page.name for page in pages}
    assert [line for line in found if "missing date" not in line] == []
    assert len(found) == len(pages)
    assert "".join(one.stderr for one in shown) == ""
    assert all("SYNOPSIS" in one.stdout for one in shown)


def test_the_package_names_the_python_that_its_libraries_are_for(installed) -> None:
    """Another Python cannot load them."""
    assert installed.run("readlink /usr/lib/batchd/bin/python3").strip().rpartition("/")[2] in installed.run(
        "dpkg-query -W -f '${Depends}' batchd"
    )


def test_a_removed_package_keeps_what_is_the_operators(installed) -> None:
    """A second installation uses it; a purge removes it, and the Debian is as before."""
    installed.run("echo '# mine' >> /etc/batchd/batchd.toml")
    installed.run("dpkg -r batchd")

    assert left(installed) == {
        "/etc/batchd",
        "/etc/batchd/batchd.toml",
        "/etc/batchd/installations",
        "/etc/batchd/installations/usr",
        *(f"/etc/{name}" for name in ("passwd", "group", "shadow", "gshadow")),
    }
    installed.run("dpkg -P batchd")
    assert left(installed) == set()


def test_lintian_finds_no_errors(package) -> None:
    """The package overrides some, each with a reason."""
    if not shutil.which("lintian"):
        pytest.skip("lintian is not installed (apt install lintian)")
    done = subprocess.run(["lintian", "--allow-root", package], capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("E:")] == []
    assert done.returncode == 0, done.stderr
