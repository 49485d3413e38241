"""Everything that can go wrong in a trainer, sorted by what the trainer does next. Runs in the trainer.

(The end of an epoch is no error: a ``for`` over a stream just ends.)

    BatchdClientError
    +-- Closed                   you closed it: stop using it
    |   +-- DaemonClosed         BatchReleased         StreamClosed          ProducerClosed
    +-- DaemonUnavailable        the other side is not there or broke: start it, or try later
    |   +-- DaemonNotFound       VersionMismatch
    |   +-- PermissionDenied
    |   |   +-- KeyRefused
    |   +-- ConnectTimeout       ReconnectTimeout      BatchTimeout          PushTimeout
    |   +-- DaemonFull           ThreadsExhausted
    +-- Misused                  the program asks for what cannot be: change the program or the configuration
    |   +-- AddressInvalid       KeyInvalid            ConnectionsInvalid
    |   +-- ForkedConnection      ReentrantCall         CopyRefused
    |   +-- StreamUnknown        RankInvalid           PositionInvalid       WindowInvalid
    |   +-- TooFewBatches        RingExhausted
    |   +-- StreamNotLive        PushNotLocal          SampleInvalid
    |   +-- TensorsInvalid       PrefetchInvalid       LoaderInWorker        StreamTaken
    |   +-- PassOvertaken        WorkersInvalid        EpochsUneven
    |   +-- RingTooSmall
    |       +-- RingBusy
    +-- ProtocolError            the peer speaks nonsense: report it
    +-- DataError                the data is not what it was, or is bad: decide what to train on
        +-- StateMismatch        StreamStopped         StreamRemoved         BatchCorrupt
        +-- StreamChanged
            +-- StreamReplaced

The first paragraph of each docstring says what happened and is replaced by the facts where they are known; the rest says
what helps and is part of every message.
"""

# ruff: noqa: N818  each is named by what is wrong, as in "except RingExhausted"

from inspect import cleandoc

from batchd_wire.codes import ErrorCode


class BatchdClientError(Exception):
    """Something went wrong between this trainer and its batchd daemon."""

    def __init__(self, facts: str | None = None) -> None:
        happened, _, remedy = cleandoc(type(self).__doc__ or "").partition("\n\n")
        super().__init__("\n".join(filter(None, (facts or " ".join(happened.split()), " ".join(remedy.split())))))


# --- you closed it ---------------------------------------------------------------------------------------------------


class Closed(BatchdClientError):
    """What was used had been closed before."""


class DaemonClosed(Closed):
    """This connection to the daemon has been closed.

    Open another one with ``batchd_client.connect()``.
    """


class StreamClosed(Closed):
    """This stream has been closed.

    Open it again with ``daemon.stream(...)``; ``state=`` takes the state of the closed one.
    """


class ProducerClosed(Closed):
    """This producer has been closed.

    Make another one with ``batchd_client.push(...)``.
    """


class BatchReleased(Closed):
    """This batch has been released, so its memory may already hold another batch.

    Read it before ``batch.release()`` or inside ``with batch:``, and copy what you keep (``batch["image"].copy()``).
    """


# --- the other side is not there, or broke ---------------------------------------------------------------------------


class DaemonUnavailable(BatchdClientError):
    """There is no daemon to talk to."""


class DaemonNotFound(DaemonUnavailable):
    """No batchd daemon answers.

    Start one with `batchd serve --config batchd.toml`, or say where it is: batchd_client.connect("ipc:///run/batchd"), or
    BATCHD_ADDRESS=ipc:///run/batchd in the environment. In a container, share the daemon's runtime directory (docker run
    -v /run/batchd:/run/batchd), or set BATCHD_ADDRESS=tcp://HOST:7070 and BATCHD_KEY.
    """


class PermissionDenied(DaemonUnavailable):
    """The daemon's runtime directory is closed to this user.

    Members of its group may connect. Where that is a group for trainers, join it (`usermod -aG GROUP USER`, then log in again; in
    a container docker run --group-add GID or podman run --group-add keep-groups). Where it is root, do not: have the daemon's
    operator give the directory such a group (`chgrp GROUP DIRECTORY`). Or run a daemon of your own.
    """


class DaemonFull(DaemonUnavailable):
    """As many trainers are connected to the daemon as it lets in.

    Close those that are done (`batchd status` lists them), or raise sessions_max under [daemon] in batchd.toml and reload it.
    """


class ThreadsExhausted(DaemonUnavailable):
    """This process cannot start the threads that ZeroMQ needs.

    Raise the limit on processes or memory that stops it: `ulimit -u`, `ulimit -v`, TasksMax= of a systemd unit, docker run
    --pids-limit.
    """


class KeyRefused(PermissionDenied):
    """The daemon does not let this key in, or not at what was asked for.

    Ask its operator for a connection file (`batchd keys new --name NAME` on its host) and set BATCHD_KEY to it.
    """


class VersionMismatch(DaemonUnavailable):
    """Daemon and client speak versions of the protocol that do not go together.

    A daemon serves older clients, so upgrade it first. `batchd --version` and `pip show batchd-client` tell what is installed.
    """


class ConnectTimeout(DaemonUnavailable):
    """The daemon is there but did not answer in time.

    It may be starting, draining or stopped: look at `batchd status` and its log, or allow more time (connect_timeout_s).
    """


class ReconnectTimeout(DaemonUnavailable):
    """The daemon went away and did not come back in time.

    The stream stands where it stood: once a daemon serves again, the same loop goes on with the next batch. Allow more
    time with connect(reconnect_timeout_s=...).
    """


class BatchTimeout(DaemonUnavailable):
    """The daemon lives, but the next batch did not come in time.

    `batchd status` tells what its workers do, and of a live stream whether anybody pushes samples; a slow pipeline or slow
    storage may need connect(batch_timeout_s=...) to be longer. The stream stands where it stood: the next call waits for
    the same batch.
    """


class PushTimeout(DaemonUnavailable):
    """The daemon lives, but the mailbox stayed full: trainers take samples more slowly than producers push them, or none does.

    The sample was not pushed. `batchd status` tells who reads the stream. Allow more time (put(timeout_s=...)), or have samples
    dropped when the mailbox is full (when_full = "drop_oldest" or "drop_newest" in batchd.toml).
    """


# --- the program asks for what cannot be -----------------------------------------------------------------------------


class Misused(BatchdClientError):
    """The program asks for something that cannot be."""


class AddressInvalid(Misused):
    """The address is none.

    Write the daemon's runtime directory, as in ipc:///run/batchd.
    """


class KeyInvalid(Misused):
    """The connection file holds no key, or is open to others.

    Give the file that `batchd keys new` printed on the daemon's host, readable by its owner alone.
    """


class ConnectionsInvalid(Misused):
    """There cannot be so many TCP connections.

    Leave ``connections=`` and ``BATCHD_CONNECTIONS`` out for one, or give a small number.
    """


class ForkedConnection(Misused):
    """This connection was opened before a fork, and belongs to the parent process.

    Call ``batchd_client.connect()`` in the child, after the fork; the parent's connection goes on undisturbed.
    """


class ReentrantCall(Misused):
    """A signal handler or a finalizer used this connection while the same thread was inside it.

    From there only read ``state_dict()``, release batches, or set a flag that the training loop looks at.
    """


class CopyRefused(Misused, TypeError):
    """A batch, a stream or a connection was to be copied or pickled, and there is one of each.

    Copy the arrays of a batch (``batch["image"].copy()``); give another process the address and ``state_dict()``, and have it
    connect by itself.
    """


class StreamUnknown(Misused):
    """The daemon serves no stream of this name.

    `batchd status` lists the streams; they are named by [streams.NAME] in the daemon's batchd.toml.
    """


class StreamNotLive(Misused):
    """Samples cannot be pushed into this stream: they come from somewhere else.

    Push into a stream that has source = { type = "push", ... } in batchd.toml.
    """


class PushNotLocal(Misused):
    """Samples can be pushed on the daemon's own host alone, and this is an address in the network.

    Run the producer there, with ipc:///run/batchd (or the daemon's other runtime directory) as its address. Trainers may be on
    any host.
    """


class SampleInvalid(Misused):
    """The sample is not what the stream takes.

    ``producer.fields`` says which fields it must have: their dtype and shape, or "image" (the bytes of an image file) or "text".
    """


class TensorsInvalid(Misused):
    """The stream's fields cannot become such tensors.

    ``loader.schema`` and ``daemon.stream(...).schema`` tell the fields, their types and shapes; the stream's pipeline decides
    them.
    """


class PrefetchInvalid(Misused):
    """There cannot be so many batches under way to the device.

    Give a number from 0, which is none ahead of the loop; 2 keep a GPU busy.
    """


class LoaderInWorker(Misused):
    """A batchd loader was used in a worker process of a DataLoader, where each worker would read the whole stream again.

    The daemon's workers do that work already: use DataLoader(dataset, batch_size=None, num_workers=0), or the BatchdLoader
    itself.
    """


class StreamTaken(Misused):
    """This stream's batches are brought to a device already, some of them ahead of the loop, so nobody else may take any.

    Make one ``batches(stream)`` before the loop over the epochs, and iterate it once for each; or open another stream.
    """


class PassOvertaken(Misused):
    """A data set was iterated anew while another iteration of the same stream was under way, and both would take its batches.

    Give each its own stream: ``dataset(daemon.stream(...))`` twice.
    """


class WorkersInvalid(Misused):
    """A BatchdPyDataset was told to have workers of Keras, and each of them would take batches out of the same stream.

    The daemon's workers do that work already: leave out ``workers`` and ``use_multiprocessing`` (they are 1 and False).
    """


class EpochsUneven(Misused):
    """Keras goes on with the number of batches that the rest of a resumed epoch had, and would leave out the others of each.

    Finish the resumed epoch by itself: model.fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1), and then train on with
    model.fit(data, initial_epoch=data.epoch, epochs=...).
    """


class RankInvalid(Misused):
    """There is no such rank.

    Ranks go from 0 to world_size - 1.
    """


class PositionInvalid(Misused):
    """There is no such position in the stream.

    Epochs and steps count from 0; ``stream.steps`` is how many steps an epoch has.
    """


class WindowInvalid(Misused):
    """The window is outside its limits.

    It says how many batches shall be ready ahead of the trainer; None takes the stream's own setting.
    """


class TooFewBatches(Misused):
    """An epoch of the stream has fewer batches than there are ranks, and drop_last = true leaves them out.

    Use a smaller batch_size, fewer ranks, or drop_last = false for the stream in batchd.toml: then ranks share batches, which the
    client logs as a warning.
    """


class RingTooSmall(Misused):
    """The stream's memory has no two slots left for one more trainer.

    Give the stream more memory (memory = in batchd.toml), or close a trainer that no longer reads.
    """


class RingBusy(RingTooSmall):
    """The stream's memory would do for one more trainer, but the others hold more than their two slots each.

    They did not give them back within ``connect_timeout_s``: have them release batches, or give the stream more memory
    (memory = in batchd.toml).
    """


class RingExhausted(Misused):
    """Every slot of the ring is held by this trainer, so no batch can be filled.

    Release batches you are done with (``batch.release()`` or ``with batch:``), copy what you keep, or give the stream
    more memory (memory = in batchd.toml). Then the same loop goes on.
    """


# --- the peer speaks nonsense ----------------------------------------------------------------------------------------


class ProtocolError(BatchdClientError):
    """The daemon sent what no daemon of this version sends.

    No batch was taken from it. This is a bug in batchd, or the peer is something else: please report it.
    """


# --- the data --------------------------------------------------------------------------------------------------------


class DataError(BatchdClientError):
    """The data is not what it was, or is bad."""


class StateMismatch(DataError):
    """The saved state does not belong to this stream as it is now.

    Bring back the files, the settings and the version of batchd it was saved with, or start without it (``state=None``). To go
    on at the same place of the other batches regardless: ``stream.seek(state["epoch"], state["step"])``.
    """


class StreamChanged(DataError):
    """The daemon serves this stream with other files or other settings now, so its positions name other batches.

    It was restarted, or has read its configuration again. Bring back the old ones, or open the stream anew with
    ``daemon.stream(...)`` to train on what is there now.
    """


class StreamReplaced(StreamChanged):
    """The daemon has read its configuration again, and serves this stream with other settings or other files now.

    Streams and producers ask for it anew by themselves, so a program seldom sees this.
    """


class StreamRemoved(DataError):
    """This stream was taken out of the daemon's configuration while it was read.

    Batches that are alive stay readable. Open another stream, or put this one back and have the daemon read its configuration
    again (`batchd reload`); then `daemon.stream(name, state=stream.state_dict())` goes on where this one stands.
    """


class BatchCorrupt(DataError):
    """A batch came several times with other bytes than the worker wrote, so something on its way is broken.

    Look at the memory of both machines (``edac-util``, the kernel's log) and, over TCP, at the network's cards and cables;
    `batchd status` on the daemon's machine says whether other trainers see it too.
    """


class StreamStopped(DataError):
    """The daemon stopped this stream.

    `batchd bad STREAM` lists its bad samples; on_error and max_bad_fraction in batchd.toml say what shall be tolerated.
    """


_BY_CODE: dict[ErrorCode, type[BatchdClientError]] = {
    ErrorCode.UNSUPPORTED_VERSION: VersionMismatch,
    ErrorCode.NOT_ALLOWED: PermissionDenied,
    ErrorCode.MALFORMED_MESSAGE: ProtocolError,
    ErrorCode.UNEXPECTED_MESSAGE: ProtocolError,
    ErrorCode.UNKNOWN_SESSION: DaemonUnavailable,
    ErrorCode.KEY_REFUSED: KeyRefused,
    ErrorCode.TOO_OFTEN: DaemonUnavailable,
    ErrorCode.TOO_MANY_SESSIONS: DaemonFull,
    ErrorCode.UNKNOWN_STREAM: StreamUnknown,
    ErrorCode.RANK_OUT_OF_RANGE: RankInvalid,
    ErrorCode.POSITION_OUT_OF_RANGE: PositionInvalid,
    ErrorCode.FINGERPRINT_MISMATCH: StateMismatch,
    ErrorCode.RING_TOO_SMALL: RingTooSmall,
    ErrorCode.RING_BUSY: RingBusy,
    ErrorCode.TOO_FEW_BATCHES: TooFewBatches,
    ErrorCode.WINDOW_OUT_OF_RANGE: WindowInvalid,
    ErrorCode.NOT_LIVE: StreamNotLive,
    ErrorCode.RING_EXHAUSTED: RingExhausted,
    ErrorCode.STREAM_STOPPED: StreamStopped,
    ErrorCode.STREAM_REMOVED: StreamRemoved,
    ErrorCode.STREAM_REPLACED: StreamReplaced,
    ErrorCode.UNKNOWN_SUBSCRIPTION: ProtocolError,
    ErrorCode.PLACE_NOT_LENT: ProtocolError,
    ErrorCode.DRAINING: DaemonUnavailable,
}
assert set(_BY_CODE) == set(ErrorCode), "an error code without an exception"


def error_for_code(error: int, text: str) -> BatchdClientError:
    """Turn what the daemon refused with into the exception for it; ``text`` is the daemon's, with the numbers."""
    try:
        kind = _BY_CODE[ErrorCode(error)]
    except ValueError:
        return ProtocolError(f"the daemon refused with the unknown error {error}: {text}")
    return kind(f"the daemon says: {text}" if text else None)
