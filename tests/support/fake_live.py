"""Gives the fake daemon a live stream, called ``live``: it answers producers."""

import os
from contextlib import suppress
from dataclasses import replace

from batchd_wire.channel import ChannelClosed, send_message
from batchd_wire.codec import Message
from batchd_wire.mailbox import MailColumn, PlaceLayout
from batchd_wire.messages import AskPlace, MailboxShared, PlaceLent, Produce, Producing, Pushed, PushTaken, WithdrawAsk
from support.fake_daemon import SEALS, FakeDaemon, make_slot
from support.fake_stream import FakeSession

LAYOUT = PlaceLayout((MailColumn("x", "uint8", (4,)),), 0)
CAPACITY = 2
SAMPLE = {"x": [1, 2, 3, 4]}


class FakeLive:
    """Answer a producer like a daemon with one live stream, except for alterations by a test."""

    def __init__(self, fake: FakeDaemon) -> None:
        self.fake = fake
        self.mailbox_bytes = CAPACITY * LAYOUT.place_bytes
        self.seals = SEALS
        self.producing = Producing(0, 1, CAPACITY, LAYOUT.to_wire())
        self.place = 0
        self.next_place: int | None = None
        self.is_full = False
        self.mailbox = -1
        self.written: list[bytes] = []
        fake.answer = self.answer

    def answer(self, session: FakeSession, message: Message) -> bool:
        """Answer a producer's messages, and leave the others to the fake daemon."""
        match message:
            case Produce():
                descriptor = make_slot(self.mailbox_bytes, self.seals)
                self.close()
                self.mailbox = descriptor  # set first: a test of the producer's end closes it
                with suppress(ChannelClosed):  # its end of file is read next
                    send_message(session.lifeline, MailboxShared(1, CAPACITY * LAYOUT.place_bytes), (descriptor,))
                self.fake.send(session, replace(self.producing, request=message.request))
            case AskPlace():
                if not self.is_full:
                    self.fake.send(session, PlaceLent(message.request, self.place))
            case Pushed():
                self.written.append(os.pread(self.mailbox, 4, message.place * LAYOUT.place_bytes))
                self.fake.send(session, PushTaken(message.request, self.next_place))
            case WithdrawAsk():
                pass
            case _:
                return False
        return True

    def close(self) -> None:
        """Close the mailbox. The next producer gets another one."""
        if self.mailbox >= 0:
            os.close(self.mailbox)
        self.mailbox = -1
