"""`make install` and `make uninstall` as root, as a user and staged; in a Debian, offline."""

import pytest

from support.roots import PHOTOS, Root

INSTALL = "make -C /mnt install WHEELS=/mnt/build/wheelhouse"
UNINSTALL = "make -C /mnt uninstall"
SOMEBODY = 4321
CHECK = f"{PHOTOS} && batchd check /etc/batchd/batchd.toml --set streams.photos.source.path=/tmp/photos"
USERS_FILES = {f"/etc/{name}" for name in ("passwd", "group", "shadow", "gshadow")}
BACKUPS = {f"{name}-" for name in USERS_FILES}
"""Files that the tools for users write each time; `/etc/.pwd.lock` is their lock."""
NOISE = BACKUPS | {"/etc/.pwd.lock"}


def documentation(root: Root, unit: str) -> str:
    """Return the first line of the page that a unit names."""
    return root.run(f"head -1 $(sed -n 's|^Documentation=.*file://||p' {unit})")


@pytest.fixture(scope="module")
def installed(root) -> Root:
    """Install batchd as root; a file in the Debian has the output."""
    (root.folder / "printed").write_text(root.run(INSTALL))
    return root


def test_an_installation_works_and_says_what_comes_next(installed) -> None:
    """The command is on the path, the user exists, and the configuration is valid."""
    printed = (installed.folder / "printed").read_text()

    assert installed.run("batchd --version").startswith("batchd ")
    assert "is fine" in installed.run(CHECK)
    assert "uid=" in installed.run("id batchd")
    assert "systemctl enable --now batchd" in printed
    assert "batchd check /etc/batchd/batchd.toml" in printed


def test_without_a_compiler_it_decodes_whole_images(installed) -> None:
    """Only the extension that decodes crops is missing."""
    program = "from batchd.data.pipeline.image.decode import decoder_versions; print(decoder_versions())"

    installed.run("! command -v cc && ! command -v gcc")
    assert installed.run(f"/usr/local/lib/batchd/bin/python -c '{program}'").startswith("simplejpeg ")


def test_the_user_of_the_service_can_run_it(installed) -> None:
    """The user needs no file that only root can read."""
    uid = int(installed.run("id -u batchd"))

    assert installed.run("batchd config", user=uid) == installed.run("cat /etc/batchd/batchd.toml")


def test_all_three_shells_have_their_completion(installed) -> None:
    """Each file is where its shell looks by default."""
    for place in (
        "bash-completion/completions/batchd",
        "zsh/site-functions/_batchd",
        "fish/vendor_completions.d/batchd.fish",
    ):
        assert "_BATCHD_COMPLETE" in installed.run(f"cat /usr/local/share/{place}")


def test_every_command_has_a_manual_page(installed) -> None:
    """Subcommands of subcommands have one, too; `man` finds the pages by name."""
    pages = installed.run("cd /usr/local/share/man/man1 && ls && zcat batchd-keys-new.1.gz")

    assert {"batchd.1.gz", "batchd-serve.1.gz", "batchd-keys-new.1.gz"} <= set(pages.split())
    assert ".SH SYNOPSIS\n.B batchd keys new" in pages


def test_no_file_names_the_place_where_it_was_made(installed) -> None:
    """Neither a path of the tree nor the staging path occurs. Guides may name any path."""
    places = "/mnt/(batchd|build|client|deploy|docs)|batchd[.]new"
    assert installed.run(f"grep -rlE --exclude-dir=doc '{places}' /usr/local", status=1) == ""


def test_the_units_name_a_page_that_is_there(installed) -> None:
    """`systemctl help batchd` opens it."""
    assert documentation(installed, "/usr/local/lib/systemd/system/batchd.service") == "# batchd as a systemd service\n"
    assert (
        documentation(installed, "/usr/local/lib/systemd/system/batchd@.service") == "# batchd as a systemd service\n"
    )


def test_what_a_configuration_says_stays(installed) -> None:
    """A second installation saves its own next to a changed one, and works."""
    installed.run("echo '# mine' >> /etc/batchd/batchd.toml")

    assert "batchd.toml.new" in installed.run(INSTALL)
    assert installed.run("tail -1 /etc/batchd/batchd.toml") == "# mine\n"
    assert installed.run("cat /etc/batchd/batchd.toml.new") == installed.run("batchd config")


def test_nothing_but_the_configuration_and_the_user_stays_behind(installed) -> None:
    """PURGE removes these too: then the Debian is as before."""
    printed = installed.run(UNINSTALL)
    left = installed.changed() - NOISE
    configuration = {path for path in left if path.startswith("/etc/batchd")}

    assert "stays: /etc/batchd" in printed
    assert "stays: the user and the group batchd" in printed
    assert "/etc/batchd/batchd.toml" in configuration
    assert left - configuration == USERS_FILES
    installed.run("touch /etc/batchd/second.toml && mkdir -p /var/lib/batchd /var/cache/batchd-second")
    installed.run(f"{UNINSTALL} PURGE=1")
    assert installed.changed() - NOISE == set()


def test_uninstalling_what_is_not_there_is_refused(root) -> None:
    """The message names the variables that may be wrong."""
    assert "give it here too" in root.run(f"{UNINSTALL} PREFIX=/opt/none", status=2)


def test_a_user_installs_without_root(root) -> None:
    """The output says that there is no system user or unit; the configuration is in the home."""
    root.run(f"install -d -o {SOMEBODY} -g {SOMEBODY} /srv/home")
    before = root.changed()
    home = "HOME=/srv/home"

    printed = root.run(f"{home} {INSTALL} PREFIX=/srv/home/.local", user=SOMEBODY)
    assert "no system user and no systemd unit" in printed
    assert root.run("/srv/home/.local/bin/batchd --version", user=SOMEBODY).startswith("batchd ")
    assert "[streams.photos]" in root.run("cat /srv/home/.config/batchd/batchd.toml")
    root.run(f"{home} {UNINSTALL} PREFIX=/srv/home/.local PURGE=1", user=SOMEBODY)
    assert root.changed() - before <= {"/srv/home/.config"}


def test_a_prefix_without_write_access_is_refused_with_an_alternative(root) -> None:
    """The message comes before any file is made."""
    assert "PREFIX=$HOME/.local" in root.run(INSTALL, user=SOMEBODY, status=2)


@pytest.mark.parametrize("prefix", ["here", "/a b", "/a|b", "/"])
def test_a_prefix_that_cannot_be_is_refused(root, prefix) -> None:
    """Scripts and units contain it."""
    assert f"PREFIX={prefix}: " in root.run(f"{INSTALL} PREFIX='{prefix}'", status=2)
