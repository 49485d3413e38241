"""What a person may type wrongly, or meet: each message says what, where, and what to type next.

Each line of ``MISTAKES`` is typed in terminals of 60, 80 and 120 columns. Then follow what needs
another user, a full disk, a reader that is gone, or an encoding.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from batchd.cli.main import COMMANDS
from batchd.errors import ExitCode
from support.commands import in_a_process, in_a_terminal
from support.daemon_process import clean_environment
from support.images import write_photos
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("forked_children")
WIDTHS = (60, 80, 120)
NOBODY = 65534
GOOD = """[daemon]
http = "off"
workers = 1
memory = "64MiB"
[streams.photos]
source = { type = "folder", path = "photos" }
batch_size = 2
pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]
"""
CHANGES = {
    "key.toml": ("batch_size", "batchsize"),
    "op.toml": ('"resize"', '"rezise"'),
    "type.toml": ('"folder"', '"foldr"'),
    "path.toml": ('"photos"', '"photso"'),
    "value.toml": ("= 2", '= "2"'),
    "not.toml": ("= 2", "="),
    "twice.toml": ("= 2", "= 2\nbatch_size = 3"),
    "field.toml": ("[8, 8]", '[8, 8], field = "imge"'),
    "call.toml": ('"resize", size = [8, 8]', '"call", function = "augment:brigthen"'),
    "returns.toml": ("size = [8, 8] }", 'size = [8, 8] }, { op = "call", function = "augment:halved" }'),
    "large.toml": ("= 2", "= 100000"),
}
AUGMENT = """def brighten(sample, rng):
    return sample

def halved(sample, rng):
    return {"image": sample["image"] / 2}
"""
NO_DAEMON = "no batchd daemon could be reached"
START_ONE = "`batchd serve`"
NO_STREAM, PHOTOS = "there is no stream 'phtos'", "did you mean photos?"
FILES = """
# words                                      | status | what is wrong | what helps
# --- commands and options
stauts                                       | 2 | there is no command 'stauts' | did you mean status?
Status                                       | 2 | there is no command 'Status' | did you mean status?
photos                                       | 2 | there is no command 'photos' | known here: init, bench,
-v                                           | 2 | there is no option -v | `batchd --help` says more
keys nwe                                     | 2 | there is no command 'nwe' | did you mean new?
keys new                                     | 2 | missing option '--name' | `batchd keys new --help` says more
keys new --name x --role trainr              | 2 | 'trainr' is not one of | 'trainer', 'worker'
keys new --name 'a b'                        | 2 | 'a b' cannot name a key | 1 to 64 letters, digits
keys revoke nobody                           | 2 | has no key 'nobody' | `batchd keys new --name NAME` makes one
ray --min 5 --max 2                          | 2 | --min 5 is more than --max 2 | Usage: batchd ray up
status --jsn                                 | 2 | there is no option --jsn | did you mean --json?
serve --confg x                              | 2 | there is no option --confg | did you mean --config?
serve --log-level inf                        | 2 | 'inf' is not one of | 'debug', 'info', 'warning', 'error'
serve --log-file x                           | 2 | --log-file goes with --detach | `batchd serve --help` says more
bench --workers 0                            | 2 | '0' is not a whole number | from 1 to 1,024
bench --seconds fast                         | 2 | 'fast' is not a number | from 1 to 3,600
top --sort nmae                              | 2 | 'nmae' is not one of | 'name', 'waits', 'batches/s', 'ahead'
logs --lines -1                              | 2 | '-1' is not a whole number | of 0 or more
define mine.toml --keep-for nan              | 2 | 'nan' is not a number | from 0 to 2,592,000
stop --timeout soon                          | 2 | 'soon' is not a number | of 0 or more
prepare photos                               | 2 | missing option '--to' | Usage: batchd prepare
prepare photos --to x --format jpgg          | 2 | 'jpgg' is not one of | 'jpg', 'png', 'webp'
peek                                         | 2 | missing argument 'STREAM' | Usage: batchd peek
peek photos 0                                | 2 | '0' is not a position | EPOCH:STEP, as in 3:117
check a.toml b.toml                          | 2 | unexpected extra argument (b.toml) | Usage: batchd check [OPTIONS] [CONFIG]
check a.toml --config b.toml                 | 2 | two configurations | name one of them
check --format json --explain                | 2 | --explain prints text | leave out --format json
check --set nonsense                         | 2 | 'nonsense' is not PATH=VALUE | such as streams.photos.batch_size=64
check --set streams.photos.batchsize=3       | 2 | streams.photos.batchsize: unknown | did you mean batch_size?
check --set streams.phtos.batch_size=3       | 2 | the file has no stream 'phtos' | did you mean photos?
check --set daemon.worker=3                  | 2 | daemon.worker: unknown key | did you mean workers?
explain unknow-key                           | 2 | there is no problem or event 'unknow-key' | did you mean unknown-key?
# --- files
check batchd.tmol                            | 2 | there is no file batchd.tmol | did you mean batchd.toml?
check nosuch.toml                            | 2 | there is no file nosuch.toml | `batchd init PATH` writes one
serve nosuch.toml --detach                   | 2 | there is no file nosuch.toml | `batchd init PATH` writes one
check photos                                 | 2 | photos is a folder | `batchd init photos` writes a configuration
check not.toml                               | 2 | not.toml:7: is not TOML | `batchd explain not-toml` tells more
check twice.toml                             | 2 | twice.toml:8: a key or table stands | `batchd explain key-twice` tells more
check key.toml                               | 2 | key.toml:7: streams.photos.batchsize | did you mean batch_size?
check op.toml                                | 2 | op.toml:8: streams.photos.pipeline[1].op | did you mean op = "resize"?
check type.toml                              | 2 | type.toml:6: streams.photos.source.type | did you mean type = "folder"?
check path.toml                              | 2 | there is no folder photso | did you mean photos?
check value.toml                             | 2 | value.toml:7: streams.photos.batch_size | must be an integer, such as 256
check field.toml                             | 2 | field.toml:8: streams.photos.pipeline[1].field | did you mean 'image'?
check call.toml                              | 2 | does not define 'brigthen' | did you mean brighten?
check returns.toml                           | 2 | from uint8[8,8,3] to float64[8,8,3] | return uint8, or declare outputs = {
check large.toml                             | 2 | must be less than or equal to 65536 | `batchd explain wrong-value` tells more
check latin.toml                             | 2 | latin.toml:1: is not UTF-8 | save the file as UTF-8
check empty.toml                             | 2 | streams: missing | `batchd init PATH` writes one
init photos                                  | 1 | batchd.toml exists | `batchd init --add PATH` adds a stream
init fotos -o y.toml                         | 2 | there is no file or folder fotos | name the folder or file that has the data
init photos -o nosuch/y.toml                 | 1 | there is no folder nosuch | make it, or name another place
init nothing -o y.toml                       | 2 | nothing has no files | name the folder or file that has the data
init losses -o y.toml                        | 2 | losses has no files that batchd recognises | `batchd config` has examples
card photos --state none.json                | 1 | there is no file none.json | `batchd card STREAM -o FILE` writes a card
card photos -o nosuch/card.json              | 1 | there is no folder nosuch | make it, or name another place
replay photos                                | 2 | name the position as EPOCH:STEP | such as 3:117
replay photos 0:999                          | 1 | stream 'photos' has no step 999 | the steps 0 to 3
replay photos 0:0 --rank 3                   | 1 | there is no rank 3 | give --world-size, too
replay photos --state losses                 | 1 | losses is not the state of a trainer | write what state_dict() gave
diff a.json b.json                           | 1 | there is no file a.json | `batchd card STREAM -o FILE` writes a card
diff batchd.toml losses                      | 1 | batchd.toml is neither a card nor | write json.dumps(stream.state_dict())
blame photos --losses none                   | 1 | there is no file none | each line is a JSON object such as
blame photos --losses losses                 | 1 | losses, line 1: has no "step" | each line is a JSON object such as
seen photos                                  | 2 | name the samples by one of | FILE, --label and --index
seen photos cat/0.jpg                        | 2 | say how far the run is | --state FILE, --epochs N or --until EPOCH:STEP
seen photos nosuch.jpg --epochs 1            | 1 | no sample in a file 'nosuch.jpg' | name it as `batchd replay` does
seen photos --label cot --epochs 1           | 1 | no sample with the label 'cot' | did you mean cat?
prepare photos --to /dev/null/x              | 1 | /dev/null/x cannot be written | name another place
demo --data nosuch                           | 1 | there is no folder nosuch | --data takes one with images
demo --folder /dev/null/x                    | 1 | /dev/null/x: Not a directory | --folder names another place
bench phtos                                  | 1 | {NO_STREAM} | {PHOTOS}
card phtos                                   | 1 | {NO_STREAM} | {PHOTOS}
replay phtos 0:0                             | 1 | {NO_STREAM} | {PHOTOS}
seen phtos x --epochs 1                      | 1 | {NO_STREAM} | {PHOTOS}
blame phtos --losses losses                  | 1 | {NO_STREAM} | {PHOTOS}
prepare phtos --to x                         | 2 | batchd.toml has no stream 'phtos' | {PHOTOS}
# --- the environment, and daemons that are away
BATCHD_WORKER=3 check                        | 0 | BATCHD_WORKER is none of | did you mean BATCHD_WORKERS?
BATCHD_WORKERS=many check                    | 2 | must be an integer or 'auto' | (set by BATCHD_WORKERS)
BATCHD_ADDRESS=nonsense status               | 3 | the address 'nonsense' is neither | as in ./nonsense or ipc:///run/batchd
BATCHD_ADDRESS=htp://x status                | 3 | the address 'htp://x' is not of | ipc:///run/batchd or tcp://host:7070
BATCHD_ADDRESS=tcp://gpu1:7070 status        | 3 | is an address in the network | Use the daemon's runtime directory
worker                                       | 2 | missing argument 'ADDRESS' | Usage: batchd worker
worker gpu1                                  | 2 | the address 'gpu1' is neither | as in tcp://gpu1:7070
worker ipc:///x                              | 2 | worker hosts need a network address | such as tcp://gpu1:7072
worker tcp://gpu1:7072                       | 2 | another host, which needs a key | batchd keys new --role worker --name NAME
worker tcp://127.0.0.1:1 --key none.key      | 2 | there is no file none.key | none.key
worker tcp://127.0.0.1:1 --map /a            | 2 | '/a' is not FROM=TO | such as /data=/mnt/data
worker tcp://127.0.0.1:1 --cache-memory lots | 2 | 'lots' is no amount of memory | write for example "4GiB"
status                                       | 3 | {NO_DAEMON} | {START_ONE}
peek photos                                  | 3 | {NO_DAEMON} | {START_ONE}
bad photos                                   | 3 | {NO_DAEMON} | {START_ONE}
why                                          | 3 | {NO_DAEMON} | {START_ONE}
top --once                                   | 3 | {NO_DAEMON} | {START_ONE}
logs                                         | 3 | {NO_DAEMON} | {START_ONE}
stop                                         | 3 | {NO_DAEMON} | {START_ONE}
reload                                       | 3 | {NO_DAEMON} | {START_ONE}
"""
SERVED = """
status phtos                                 | 1 | {NO_STREAM} | {PHOTOS}
peek phtos                                   | 1 | {NO_STREAM} | {PHOTOS}
bad phtos                                    | 1 | {NO_STREAM} | {PHOTOS}
why phtos                                    | 1 | {NO_STREAM} | {PHOTOS}
blame phtos                                  | 1 | the daemon has no stream 'phtos' | {PHOTOS}
peek photos 0:9999                           | 1 | epoch 0, step 9999 | has steps 0 to 3
peek photos --field imag                     | 1 | has no images in a field 'imag' | did you mean image?
peek photos -o nosuch/sheet.png              | 1 | there is no folder nosuch | make it, or name another place
"""


def mistakes(table: str) -> list[tuple[str, int, str, str]]:
    """The rows of a table: what is typed, the exit status, what is wrong, and what helps."""
    words = {"{NO_STREAM}": NO_STREAM, "{PHOTOS}": PHOTOS, "{NO_DAEMON}": NO_DAEMON, "{START_ONE}": START_ONE}
    rows = [line.split("|") for line in table.splitlines() if line and not line.startswith("#")]
    found = []
    for row in rows:
        line, status, wrong, helps = (cell.strip() for cell in row)
        found.append((line, int(status), words.get(wrong, wrong), words.get(helps, helps)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with eight photographs, a configuration, and others with one mistake each."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_photos(folder / "photos", {"cat": 4, "dog": 4})
    (folder / "nothing").mkdir()
    for name, (right, wrong) in CHANGES.items():
        (folder / name).write_text(GOOD.replace(right, wrong, 1))
    (folder / "batchd.toml").write_text(GOOD)
    (folder / "augment.py").write_text(AUGMENT)
    (folder / "empty.toml").write_text("")
    (folder / "latin.toml").write_bytes(b"# caf\xe9\n")
    (folder / "losses").write_text('{"epoch": 0}\n')
    return folder


def typed(line: str, width: int, address: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Type a line in a terminal of so many columns; variables may stand before the words."""
    words, variables = shlex.split(line), {"BATCHD_ADDRESS": address, "BATCHD_KEYS_DIR": str(folder / "no-keys")}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        variables[name] = value
    return in_a_terminal(words, width, clean_environment() | variables, folder)


def check(line: str, status: int, wrong: str, helps: str, address: str, folder: Path) -> None:
    """Type a line at each width: the message is the same, in lines that fit, with whole words."""
    texts = []
    for width in WIDTHS:
        done = typed(line, width, address, folder)
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        for text in (done.stdout + done.stderr).splitlines():
            fits = len(text) <= width or " " not in text.strip()
            assert fits, f"{len(text)} of {width} columns: {text}"
        texts.append(flat(done.stderr))
    assert texts[0] == texts[1] == texts[2], "a word is broken"
    assert wrong in texts[0]
    assert helps in texts[0]


def flat(text: str) -> str:
    """The words of a message, without the excerpt of a file, which is as long as its line."""
    return " ".join(" ".join(line for line in text.splitlines() if not re.match(r" *\d* \|", line)).split())


@pytest.mark.parametrize(("line", "status", "wrong", "helps"), mistakes(FILES), ids=lambda value: str(value)[:40])
def test_a_mistake_is_named_with_what_helps(folder, line, status, wrong, helps) -> None:
    """No daemon runs; nothing is left behind."""
    before = {path.name for path in folder.iterdir()}
    check(line, status, wrong, helps, f"ipc://{folder}/none", folder)
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}


@pytest.mark.parametrize("words", ["", *COMMANDS, "keys new", "keys list", "ray up", "ray down"])
def test_help_has_the_same_words_at_each_width(words, tmp_path) -> None:
    """No option or address is broken where a line ends."""
    texts = [typed(f"{words} --help", width, "", tmp_path).stdout for width in WIDTHS]
    assert sorted(texts[0].split()) == sorted(texts[1].split()) == sorted(texts[2].split())


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, folder):
    """Serve the photographs."""
    return start_shared_daemon({"photos": folder_stream(folder / "photos", batch_size=2)})


@pytest.mark.parametrize(("line", "status", "wrong", "helps"), mistakes(SERVED), ids=lambda value: str(value)[:40])
def test_a_mistake_at_a_daemon_is_named_with_what_helps(daemon, folder, line, status, wrong, helps) -> None:
    """The daemon goes on."""
    check(line, status, wrong, helps, daemon.address, folder)
    assert daemon.status()["daemon"]["pid"] == daemon.pid


# --- what the system does -------------------------------------------------------------------------


def run(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command as a process."""
    return in_a_process([*words], clean_environment() | {"BATCHD_ADDRESS": f"ipc://{folder}/none"}, folder)


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be someone else, or mount a disk")


@root_only
@pytest.mark.parametrize(
    ("line", "wrong", "helps"),
    [
        ("status", "permission denied", "group"),
        ("stop", "permission denied", "group"),
        ("reload", "permission denied", "group"),
        ("check secret.toml", "secret.toml cannot be read: Permission denied", "give this user (uid 65534) the right"),
        ("card photos -o card.json", "this user (uid 65534) may not write to", "name another place"),
        ("init photos -o new.toml", "this user may not write to", "use -o FILE"),
    ],
)
def test_another_user_is_told_what_it_may_not(daemon, folder, line, wrong, helps) -> None:
    """The message has the right that is missing."""
    (folder / "secret.toml").write_text(GOOD)
    (folder / "secret.toml").chmod(0o600)
    for path in (folder, *folder.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o055)
    # the modules: the interpreter's folder may be root's alone
    typed("check secret.toml", 80, "", folder)
    typed("status", 80, f"ipc://{folder}/none", folder)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        done = typed(line, 80, daemon.address, folder)
    finally:
        os.setresuid(0, 0, 0)
        (folder / "secret.toml").unlink()
    assert done.returncode in {1, 2, 3}
    assert wrong in flat(done.stderr)
    assert helps in flat(done.stderr)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk that has no room."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    try:
        (folder / "all").write_bytes(bytes(64 << 10))
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.thorough(after_first=True)
@root_only
@pytest.mark.parametrize("words", ["card photos -o", "init photos --force -o", "keys new --name x --keys-dir keys -o"])
def test_a_full_disk_is_named(folder, full_disk, words) -> None:
    """The message has the file and the system's words, and no half of the file stays."""
    file = full_disk / "new.toml"
    done = run(*shlex.split(words), str(file), folder=folder)
    assert done.returncode == ExitCode.FAILED
    assert f"{file} cannot be written: No space left on device" in done.stderr
    assert not file.exists() or words.startswith("card"), "a card is rewritten in place"


def test_a_full_standard_output_and_a_closed_one(folder) -> None:
    """The first is an error, the second was closed on purpose."""
    for end, status in ((">/dev/full", ExitCode.FAILED), (">&-", ExitCode.FINE)):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m batchd config {end}"],
            capture_output=True,
            text=True,
            env=clean_environment(),
            cwd=folder,
            check=False,
        )
        assert done.returncode == status
        assert ("standard output cannot be written: No space left" in done.stderr) == bool(status)
        assert "Traceback" not in done.stderr


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("words", ["config", "explain", "check --explain", "--help"])
def test_a_reader_that_is_gone_ends_a_command_in_silence(folder, words) -> None:
    """As with `| head -1`; the command is done before it can tell, or ends."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m batchd {words} | head -1"],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=folder,
        check=False,
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", ["top --once --interval 0.1", "status", "bad photos", "check", "--help"])
def test_an_encoding_that_lacks_characters_is_no_error(daemon, folder, encoding, words) -> None:
    """Bars and names fall back to what the terminal has."""
    done = in_a_terminal(
        shlex.split(words), 80, clean_environment() | {"BATCHD_ADDRESS": daemon.address}, folder, encoding
    )
    assert done.returncode == 0
    assert "?" not in done.stdout


def test_ctrl_c_is_quiet(daemon, folder) -> None:
    """The exit status says it, and nothing else."""
    words = [sys.executable, "-m", "batchd", "why", "--seconds", "600"]
    environment = clean_environment() | {"BATCHD_ADDRESS": daemon.address}
    with subprocess.Popen(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        wait_until(lambda: waiting.pid in [one["pid"] for one in daemon.status()["trainers"]], "it asks")
        waiting.send_signal(signal.SIGINT)
        output, errors = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, output, errors.strip()) == (ExitCode.INTERRUPTED, "", "")


def test_a_second_daemon_and_a_taken_port_are_named(daemon, folder) -> None:
    """The message has the process that is in the way, or the key to set."""
    second = run("serve", "--set", f"daemon.runtime_dir={daemon.runtime_dir}", folder=folder)
    assert second.returncode == ExitCode.ALREADY_RUNNING
    assert str(daemon.pid) in second.stderr
    assert "runtime_dir" in second.stderr

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run_dir = f"daemon.runtime_dir={folder}/other"
        refused = run("serve", "--set", f"daemon.http={address}", "--set", run_dir, folder=folder)
    assert refused.returncode == ExitCode.USAGE
    assert address.rpartition(":")[2] in refused.stderr
    assert "http" in refused.stderr


def test_a_folder_that_was_removed_is_no_error(daemon, tmp_path) -> None:
    """A command that needs no file works there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && {sys.executable} -P -m batchd status"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env=clean_environment() | {"BATCHD_ADDRESS": daemon.address},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
