"""Errors of the client, sorted by what the caller does next. Runs in the trainer.

(The end of an epoch is no error: a ``for`` over a stream just ends.)

    BatchdClientError
    +-- Closed                   you closed it: stop using it
    |   +-- DaemonClosed         BatchReleased         StreamClosed          ProducerClosed
    +-- DaemonUnavailable        the daemon is missing or failed: start it, or try later
    |   +-- DaemonNotFound       VersionMismatch
    |   +-- PermissionDenied
    |   |   +-- KeyRefused
    |   +-- ConnectTimeout       ReconnectTimeout      BatchTimeout          PushTimeout
    |   +-- DaemonFull           ThreadsExhausted
    +-- Misused                  the request is impossible: change the program or the configuration
    |   +-- AddressInvalid       NameInvalid           KeyInvalid            ConnectionsInvalid
    |   +-- TimeoutInvalid       ForkedConnection      ReentrantCall         CopyRefused
    |   +-- StreamUnknown        RankInvalid           PositionInvalid       WindowInvalid
    |   +-- TooFewBatches        BatchSizeInvalid      RingExhausted         SettingsInvalid
    |   +-- StreamNotLive        PushNotLocal          SampleInvalid
    |   +-- TensorsInvalid       PrefetchInvalid       LoaderInWorker        StreamTaken
    |   +-- PassOvertaken        WorkersInvalid        EpochsUneven          ReportInvalid
    |   +-- DefinitionRefused
    |   +-- RingTooSmall
    |       +-- RingBusy
    +-- ProtocolError            the peer sent an unexpected message: report it
    +-- DataError                the data has changed, or is bad: decide what to train on
        +-- StateMismatch        StreamStopped         StreamRemoved         BatchCorrupt
        +-- StreamChanged
            +-- StreamReplaced

The first paragraph of each docstring says what happened; an error with known facts has those in its
place. The rest is the remedy, and part of every message.
"""

# ruff: noqa: N818  each is named by what is wrong, as in "except RingExhausted"

from inspect import cleandoc
from typing import ClassVar, NoReturn, SupportsIndex

from batchd_wire.codes import ErrorCode


class BatchdClientError(Exception):
    """Something went wrong between this trainer and its batchd daemon."""

    def __init__(self, facts: str | None = None) -> None:
        happened, _, remedy = cleandoc(type(self).__doc__ or "").partition("\n\n")
        text, helps = facts or " ".join(happened.split()), " ".join(remedy.split())
        # an unpickled error, or one that a DataLoader makes again, has its remedy already
        super().__init__(text if not helps or text.endswith(helps) else f"{text}\n{helps}")


# --- you closed it --------------------------------------------------------------------------------


class Closed(BatchdClientError):
    """The object has been closed."""


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

    Read it before ``batch.release()`` or inside ``with batch:``, and copy what you keep
    (``batch["image"].copy()``).
    """


# --- the daemon is missing, or failed --------------------------------------------------------


class DaemonUnavailable(BatchdClientError):
    """No daemon is available."""


class DaemonNotFound(DaemonUnavailable):
    """No batchd daemon answers.

    Start one with `batchd serve batchd.toml` (`batchd init PATH` writes that file for your
    data), or give its address:
    batchd_client.connect("ipc:///run/batchd"), or BATCHD_ADDRESS=ipc:///run/batchd in the
    environment. In a container, share the daemon's runtime directory (docker run -v
    /run/batchd:/run/batchd), or set BATCHD_ADDRESS=tcp://HOST:7070 and BATCHD_KEY.
    """


class PermissionDenied(DaemonUnavailable):
    """The daemon's runtime directory is closed to this user.

    Members of its group may connect. If that is a group for trainers, join it
    (`usermod -aG GROUP USER`, then log in again; in a container docker run --group-add GID or
    podman run --group-add keep-groups). If it is root, do not: have the daemon's operator give the
    directory such a group (`chgrp GROUP DIRECTORY`). Or run your own daemon.
    """


class DaemonFull(DaemonUnavailable):
    """The daemon has reached its maximum number of trainers.

    Close unused ones (`batchd status` lists them), or raise sessions_max under [daemon] in
    batchd.toml and reload it.
    """


class ThreadsExhausted(DaemonUnavailable):
    """This process cannot start the threads that ZeroMQ needs.

    Raise the limit on processes or memory: `ulimit -u`, `ulimit -v`, TasksMax= of a systemd unit,
    docker run --pids-limit.
    """


class KeyRefused(PermissionDenied):
    """The daemon refuses this key, or this use of it.

    Ask its operator for a connection file (`batchd keys new --name NAME` on its host) and set
    BATCHD_KEY to it.
    """


class VersionMismatch(DaemonUnavailable):
    """Daemon and client speak incompatible versions of the protocol.

    A daemon serves older clients, so upgrade it first. `batchd --version` and
    `pip show batchd-client` print the installed versions.
    """


class ConnectTimeout(DaemonUnavailable):
    """The daemon exists but did not answer in time.

    It may be starting, draining or stopped: look at `batchd status` and its log, or allow more time
    (connect_timeout_s).
    """


class ReconnectTimeout(DaemonUnavailable):
    """The connection to the daemon was lost, and the daemon did not come back in time.

    The stream keeps its position: once a daemon serves again, the same loop continues with the next
    batch. Allow more time with connect(reconnect_timeout_s=...).
    """


class BatchTimeout(DaemonUnavailable):
    """The daemon lives, but the next batch was not ready in time.

    `batchd status` shows what its workers do, and whether a live stream has producers; a slow
    pipeline or slow storage may need a longer connect(batch_timeout_s=...). The stream keeps its
    position: the next call waits for the same batch. Storage that is away has a limit of its own:
    storage_away_s of the stream.
    """


class PushTimeout(DaemonUnavailable):
    """The daemon lives, but the mailbox stayed full: trainers are too slow, or there are none.

    The sample was not pushed. `batchd status` shows the stream's trainers. Allow more time
    (put(timeout_s=...)), or drop samples when the mailbox is full (when_full = "drop_oldest" or
    "drop_newest" in batchd.toml).
    """


# --- the request is impossible ----------------------------------------------------------


class Misused(BatchdClientError):
    """The program requests something impossible."""


class AddressInvalid(Misused):
    """Invalid address.

    Use the daemon's runtime directory, as in ipc:///run/batchd.
    """


class KeyInvalid(Misused):
    """The connection file holds no trainer's key, or is open to others.

    Use the file that `batchd keys new` printed on the daemon's host, readable only by its owner.
    """


class NameInvalid(Misused):
    """Invalid name of a run.

    Use 1 to 64 printable characters in ``connect(name=)`` or ``BATCHD_NAME``, or leave both out.
    """


class ConnectionsInvalid(Misused):
    """Too many TCP connections requested.

    Leave ``connections=`` and ``BATCHD_CONNECTIONS`` out for one, or use a small number.
    """


class TimeoutInvalid(Misused):
    """A time limit is no number of seconds.

    Give 0 or more, as in ``connect(reconnect_timeout_s=600)`` or ``BATCHD_RECONNECT_TIMEOUT=600``.
    """


class ForkedConnection(Misused):
    """This connection was opened before a fork, and belongs to the parent process.

    Call ``batchd_client.connect()`` in the child, after the fork; the parent's connection is not
    affected.
    """


class ReentrantCall(Misused):
    """A signal handler or a finalizer used this connection while the same thread was inside it.

    There, only read ``state_dict()``, release batches, or set a flag that the training loop checks.
    """


class CopyRefused(Misused, TypeError):
    """Batches, streams and connections cannot be copied or pickled.

    Copy the arrays of a batch (``batch["image"].copy()``). Give another process the address and
    ``state_dict()``, and let it open its own connection and stream. A DataLoader with worker
    processes pickles its data set: use num_workers=0, as the daemon's workers do that work already.
    """


class StreamUnknown(Misused):
    """The daemon serves no stream of this name.

    `batchd status` lists the streams; they are named by [streams.NAME] in the daemon's batchd.toml.
    """


class StreamNotLive(Misused):
    """Samples cannot be pushed into this stream: they come from another kind of source.

    Push into a stream that has source = { type = "push", ... } in batchd.toml.
    """


class PushNotLocal(Misused):
    """Samples can only be pushed on the daemon's own host, and this is a network address.

    Run the producer there, with ipc:///run/batchd (or the daemon's other runtime directory) as its
    address. Trainers may be on any host.
    """


class SampleInvalid(Misused):
    """The sample does not fit the stream.

    ``producer.fields`` lists the required fields: their dtype and shape, or "image" (the bytes of
    an image file) or "text".
    """


class TensorsInvalid(Misused):
    """The stream's fields cannot become such tensors.

    ``loader.schema`` and ``daemon.stream(...).schema`` list the fields, their types and shapes; the
    stream's pipeline decides them.
    """


class ReportInvalid(Misused):
    """A report does not fit the batch that it is about.

    Report one number for a batch, or one for each of its rows, of a batch that this loop has
    received: by default the last one, or ``at=batch``.
    """


class PrefetchInvalid(Misused):
    """Invalid number of batches in transit to the device.

    Use a number from 0, which is none ahead of the loop; 2 keep a GPU busy.
    """


class LoaderInWorker(Misused):
    """A batchd loader was used in a worker of a DataLoader, where each would read the whole stream.

    The daemon's workers do that work already: use DataLoader(dataset, batch_size=None,
    num_workers=0), or the BatchdLoader itself.
    """


class StreamTaken(Misused):
    """Another iterator already copies this stream's batches to a device, some ahead of its loop.

    Make one ``batches(stream)`` before the loop over the epochs, and iterate it once for each; or
    open another stream.
    """


class PassOvertaken(Misused):
    """A second iteration of the same stream began before the first had ended.

    Both would take its batches, so give each its own stream: ``dataset(daemon.stream(...))`` twice.
    """


class WorkersInvalid(Misused):
    """A BatchdPyDataset has Keras workers, and each would take batches of the same stream.

    The daemon's workers do that work already: leave out ``workers`` and ``use_multiprocessing``
    (they are 1 and False).
    """


class EpochsUneven(Misused):
    """Keras would give all epochs the length of a resumed one, and leave out their other batches.

    Finish the resumed epoch in its own fit: model.fit(data, initial_epoch=data.epoch,
    epochs=data.epoch + 1), then continue with model.fit(data, initial_epoch=data.epoch,
    epochs=...).
    """


class RankInvalid(Misused):
    """Invalid rank.

    Ranks are numbered from 0 to world_size - 1.
    """


class PositionInvalid(Misused):
    """The stream has no such position.

    Epochs and steps count from 0; ``stream.steps`` is the number of steps in an epoch.
    """


class WindowInvalid(Misused):
    """The window is outside its limits.

    It is the number of batches that are ready ahead of the trainer; None takes the stream's own
    setting.
    """


class BatchSizeInvalid(Misused):
    """A trainer cannot read this stream in batches of its own size.

    A live stream and one with a budget decide their batches themselves: leave ``batch_size`` out.
    Of images that have a size of their own in each batch, it divides that of the stream.
    It is a number from 1 to 65,536.
    """


class TooFewBatches(Misused):
    """An epoch of the stream has fewer batches than ranks, and drop_last = true drops them.

    Use a smaller batch_size, fewer ranks, or drop_last = false for the stream in batchd.toml: then
    ranks share batches, which the client logs as a warning.
    """


class SettingsInvalid(Misused):
    """The stream cannot be had with these settings.

    `set=` takes keys of the stream by dotted paths, as batchd.toml has them, if the daemon's
    operator allows it (derive = true under [daemon]): see docs/sharing.md.
    """


class DefinitionRefused(Misused):
    """The daemon does not serve this table as a stream.

    `daemon.define` takes the keys of a stream as batchd.toml has them. Who may define what, and
    below which folders, is for the daemon's operator to say ([daemon.define]): see docs/define.md.
    """


class RingTooSmall(Misused):
    """The stream's memory has no two slots left for another trainer.

    Give the stream more memory (memory = in batchd.toml), or close an unused trainer.
    """


class RingBusy(RingTooSmall):
    """The stream's memory suffices for another trainer, but others hold more than their two slots.

    They did not return them within ``connect_timeout_s``: have them release batches, or give the
    stream more memory (memory = in batchd.toml).
    """


class RingExhausted(Misused):
    """Every slot of the ring is held by this trainer, so no batch can be filled.

    Release batches you are done with (``batch.release()`` or ``with batch:``), copy what you keep,
    or give the stream more memory (memory = in batchd.toml). Then the same loop continues.
    """


class NotCopyable:
    """Base of batches, streams and connections: refuses copies and pickling.

    A copy would share the lease or the claim of the original: after the release of one, the daemon
    would write under the other. ``COPY_ADVICE`` is the remedy in the message.
    """

    __slots__ = ()
    COPY_ADVICE: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyRefused(f"{self!r} cannot be copied or pickled: {self.COPY_ADVICE}")


# --- unexpected messages ---------------------------------------------------------------------


class ProtocolError(BatchdClientError):
    """Unexpected message from the daemon.

    No batch was taken from it. This is a bug in batchd, or the peer is another program: please
    report it.
    """


# --- the data -------------------------------------------------------------------------------------


class DataError(BatchdClientError):
    """The data has changed, or is bad."""


class StateMismatch(DataError):
    """The saved state does not match the present form of this stream.

    Restore the files, the settings and the version of batchd it was saved with, or start without it
    (``state=None``). If only ``batch_size`` has changed, ``convert=True`` beside ``state=`` goes on
    at the first sample that was not delivered. To continue regardless, behind as many samples of
    the epoch: ``stream.seek(state["epoch"], sample=state["step"] * batch_size)``, with the
    ``batch_size`` of then.
    """


class StreamChanged(DataError):
    """The stream now has other files or other settings, so its positions name other batches.

    The daemon was restarted, or has reloaded its configuration. Restore the old ones, or open the
    stream again with ``daemon.stream(...)`` to train on the new ones.
    """


class StreamReplaced(StreamChanged):
    """The daemon has reloaded its configuration, and the stream now has other settings or files.

    Streams and producers subscribe again by themselves, so a program seldom sees this.
    """


class StreamRemoved(DataError):
    """This stream was removed from the daemon's configuration while it was read.

    Living batches stay readable. Open another stream, or restore this one and have the daemon
    reload its configuration (`batchd reload`); then
    `daemon.stream(name, state=stream.state_dict())` continues at this position.
    """


class BatchCorrupt(DataError):
    """A batch arrived several times with other bytes than the worker wrote.

    Memory or the network is faulty. Check the memory of both machines (``edac-util``, the kernel's
    log) and, over TCP, the network's cards and cables; `batchd status` on the daemon's machine
    shows whether other trainers have the same problem.
    """


class StreamStopped(DataError):
    """The daemon stopped this stream.

    `batchd bad STREAM` lists its bad samples; on_error and max_bad_fraction in batchd.toml set what
    is tolerated.
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
    ErrorCode.SETTINGS_REFUSED: SettingsInvalid,
    ErrorCode.DEFINITION_REFUSED: DefinitionRefused,
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
    """Make the exception of a refusal; ``text`` is the daemon's, with the amounts."""
    try:
        kind = _BY_CODE[ErrorCode(error)]
    except ValueError:
        return ProtocolError(f"the daemon refused with the unknown error {error}: {text}")
    return kind(f"the daemon says: {text}" if text else None)
