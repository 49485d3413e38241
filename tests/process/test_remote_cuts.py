"""First connections over a breaking network: they succeed once it is whole, and read exactly."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_wire.keys import connection_file_text
from support.expected import Expected
from support.network import Proxy, free_port
from support.seen import see
from support.waiting import PATIENCE_S, wait_until

CUTS = [0, 1, 10, 33, 63, 65, 80, 100, 130, 200, 233, 240, 270, 300, 350, 420, 600, 1_000, 5_000, 50_000]
"""In the greeting (64 bytes), CURVE's or the first messages, and the first batch."""
FIRST_MESSAGES = 8
"""The daemon's parts: its greeting, CURVE, ``Greeted``, ``Subscribed``, and first batches."""


@pytest.fixture(scope="module", params=["with keys", "without keys"])
def key(request, tmp_path_factory):
    """Make a directory for keys and one key in a file, or return neither."""
    folder = tmp_path_factory.mktemp("keys")
    keys = KeyDirectory(folder / "keys")
    if request.param == "without keys":
        return keys.path, None
    keys.make_daemon_key()
    file = folder / "good.conn"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new("good", None)))
    return keys.path, str(file)


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, key):
    """Start a daemon with keys, or one without."""
    return start_shared_daemon(tcp=f"127.0.0.1:{free_port()}", keys_dir=str(key[0]))


@pytest.fixture
def proxy(daemon):
    """Start the proxy in front of the daemon."""
    with Proxy(int(daemon.tcp_address.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def read_all(proxy, key):
    """Connect and read an epoch."""

    def read():
        with batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", key=key[1], connect_timeout_s=PATIENCE_S) as far:
            return see(far.stream("photos", epochs=1))

    return read


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("cut_after", CUTS)
def test_a_first_connection_that_is_cut_at_any_byte_is_made_when_the_network_is_whole(
    daemon, proxy, read_all, cut_after
):
    """Several connections are cut there; the trainer never reports a fitting key as a wrong one."""
    proxy.cut_after = cut_after
    with ThreadPoolExecutor(1) as background:
        seen = background.submit(read_all)
        wait_until(lambda: seen.done() or proxy.connections >= 6, "it was cut, or got through")
        proxy.cut_after = None
        assert seen.result(PATIENCE_S) == Expected(daemon.config).epoch(0)


@pytest.mark.thorough(after_first=True)
def test_a_first_connection_that_is_cut_between_two_messages_is_made_again(daemon, proxy, read_all):
    """The cut follows each of a daemon's first parts, or is a byte before or after its end."""
    ends = []

    def note(data):
        ends.append((ends[-1] if ends else 0) + len(data))
        return data

    proxy.alter = note
    everything = read_all()
    assert everything == Expected(daemon.config).epoch(0)
    proxy.alter = bytes
    for end in ends[:-1][:FIRST_MESSAGES]:
        for cut_after in (end - 1, end, end + 1):
            proxy.cut_after, proxy.cuts_left = cut_after, 1
            assert read_all() == everything
            assert proxy.cuts_left == 0
