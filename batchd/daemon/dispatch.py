"""From messages of trainers to items of the daemon's queue, for both doors. DAEMON process.

    message of an open session -> event, for the core | ``Query``, for the loop

Each message becomes one item; nothing is answered here.
"""

from collections.abc import Iterator

from batchd import failpoints
from batchd.core.events import (
    BatchMismatched,
    Event,
    PlaceAsked,
    PlaceWithdrawn,
    ProducerAsked,
    Pulled,
    SamplePushed,
    SubscriptionAsked,
    SubscriptionEnded,
)
from batchd.daemon.doors import Query
from batchd_wire import OLDEST_VERSION, PROTOCOL_VERSION
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import (
    AskBad,
    AskPlace,
    AskReload,
    AskStatus,
    Mismatched,
    Produce,
    Pull,
    Pushed,
    Refused,
    Subscribe,
    Unsubscribe,
    WithdrawAsk,
)

UNREAD_MAX = 4_096
"""Unread messages after which a trainer is disconnected; a correct one stays far below."""
MESSAGE_BYTES_MAX = 64 * 1024
"""Longest message from a trainer that ZeroMQ lets through."""
HANDSHAKE_TIMEOUT_MS = 5_000
MESSAGES_AT_ONCE = 64


def event_of(
    session: int, message: Message, numbers: Iterator[int], *, is_remote: bool = False
) -> Event | Query | None:
    """Return the event or query of a trainer's message; None if it is not one of an open session.

    ``numbers`` gives each subscription a number.
    """
    match message:
        case Pull():
            return _pulled(session, message, is_remote=is_remote)
        case Subscribe():
            return _asked(session, next(numbers), message, is_remote=is_remote)
        case Mismatched():
            return BatchMismatched(session, message.subscription, message.sequence, message.generation)
        case Unsubscribe():
            return SubscriptionEnded(session, message.subscription, message.consumed)
        case AskPlace():
            return PlaceAsked(session, message.request, message.stream)
        case Pushed():
            return SamplePushed(session, message.request, message.stream, message.place)
        case WithdrawAsk():
            return PlaceWithdrawn(session, message.stream)
        case Produce():
            return ProducerAsked(session, message.request, message.stream)
        case AskStatus() | AskBad() | AskReload():
            return Query(session, message)
        case _:
            return None


def _pulled(session: int, message: Pull, *, is_remote: bool) -> Pulled:
    if message.released:
        failpoints.passing("daemon.release.received")
    # The daemon itself ends the leases of batches that were sent as bytes.
    released = [] if is_remote else [(sequence, generation) for sequence, generation in message.released]
    return Pulled(session, message.subscription, message.consumed, message.waiting, message.wait_us, released)


def _asked(session: int, subscription: int, message: Subscribe, *, is_remote: bool) -> SubscriptionAsked:
    return SubscriptionAsked(
        session=session,
        subscription=subscription,
        request=message.request,
        stream=message.stream,
        rank=message.rank,
        world_size=message.world_size,
        window=message.window,
        epoch=message.epoch,
        step=message.step,
        end_epoch=message.end_epoch,
        fingerprint=message.fingerprint,
        is_spectator=message.is_spectator,
        is_remote=is_remote,
    )


def is_served(version: int) -> bool:
    """True if clients of this protocol version are served."""
    return OLDEST_VERSION <= version <= PROTOCOL_VERSION


def wrong_version(theirs: int) -> Refused:
    """Refuse an unserved version, with the numbers and the command that upgrades the older side."""
    is_old = theirs < OLDEST_VERSION
    older = "client (pip install --upgrade batchd-client)" if is_old else "daemon (pip install --upgrade batchd)"
    served = f"clients of the versions {OLDEST_VERSION} to {PROTOCOL_VERSION} of the protocol"
    text = f"the daemon serves {served}, and this client speaks version {theirs}: upgrade the {older}"
    return Refused(0, 0, ErrorCode.UNSUPPORTED_VERSION, text)
