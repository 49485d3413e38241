"""A daemon that sends invalid messages to a producer.

The producer writes to no wrong place, and leaves no descriptor open.
"""

import fcntl

import pytest

import batchd_client
from batchd_client.errors import ProtocolError, PushTimeout, StreamChanged
from batchd_wire.mailbox import MailColumn, PlaceLayout
from batchd_wire.messages import AskPlace, Producing, WithdrawAsk
from support.fake_live import CAPACITY, LAYOUT, SAMPLE, FakeLive
from support.waiting import PATIENCE_S


@pytest.fixture
def live(fake):
    live = FakeLive(fake)
    yield live
    live.close()


def push(fake):
    return batchd_client.push("live", fake.address, connect_timeout_s=5, reconnect_timeout_s=5)


def test_an_honest_one_gets_the_sample(fake, live):
    """This is the reference for the hostile cases."""
    with push(fake) as producer:
        assert producer.fields == {"x": "uint8[4]"}
        assert producer.put(SAMPLE)
        live.place = 1
        assert producer.put({"x": [5, 6, 7, 8]})
    assert live.written == [bytes([1, 2, 3, 4]), bytes([5, 6, 7, 8])]


@pytest.mark.parametrize("where", ["lent", "next"])
def test_a_place_that_is_not_in_the_mailbox_is_not_written(fake, live, where):
    """The producer rejects the place, whichever message lends it."""
    with push(fake) as producer:
        if where == "lent":
            live.place = CAPACITY
        else:
            live.next_place = 1 << 50
        with pytest.raises(ProtocolError, match="was lent of a mailbox that has 2"):
            producer.put(SAMPLE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mailbox_bytes": 4096}, "8192 bytes was shared as 4096"),
        ({"seals": fcntl.F_SEAL_GROW}, "not sealed against shrinking"),
        ({"producing": Producing(0, 1, 9, LAYOUT.to_wire())}, "is not 9 places long"),
        ({"producing": Producing(0, 1, 2, [[["x", "object", []]], 0])}, "describes its mailbox wrongly"),
    ],
)
def test_a_mailbox_that_cannot_be_is_not_used(fake, live, changes, said):
    """Size, seals and layout are checked, and the connection closes."""
    for name, value in changes.items():
        setattr(live, name, value)
    with pytest.raises(ProtocolError, match=said):
        push(fake)


def test_a_producer_that_waits_asks_again_and_withdraws_at_last(fake, live, let_pass):
    """A lost request is repeated, and a late answer does not waste a place."""
    live.is_full = True

    def answer(session, message):
        if isinstance(message, AskPlace) and len(fake.heard_of(AskPlace)) == 2:
            let_pass(PATIENCE_S)
        return live.answer(session, message)

    fake.answer = answer
    with push(fake) as producer:
        with pytest.raises(PushTimeout, match="no place of the 2"):
            producer.put(SAMPLE, timeout_s=PATIENCE_S)
        fake.wait_until(lambda: fake.heard_of(WithdrawAsk))
        assert len(fake.heard_of(AskPlace)) == 2
        live.is_full = False
        assert producer.put(SAMPLE)


def test_a_stream_with_other_fields_is_another_stream(fake, live):
    """After a restart the program must check its fields again."""
    with push(fake) as producer:
        assert producer.put(SAMPLE)
        live.close()
        fake.kill()
        fake.start()
        other = PlaceLayout((MailColumn("x", "uint8", (5,)),), 0)
        live.producing = Producing(0, 1, CAPACITY, other.to_wire())
        with pytest.raises(StreamChanged, match="other fields"):
            producer.put(SAMPLE)
