"""batchd in Keras 3 with any backend: a stream as a ``PyDataset``, and a progress callback.

    from batchd_client.keras import BatchdPyDataset, Progress

    photos = BatchdPyDataset(batchd_client.connect().stream("photos"))
    progress = Progress(photos.stream)
    model.fit(photos, epochs=90, callbacks=[progress])          # progress.state_dict() at any time

Runs in the trainer. Needs only Keras; with TensorFlow as its backend,
``batchd_client.tensorflow.dataset`` is faster.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

try:
    import keras
except ImportError as _error:
    raise ImportError(
        "batchd_client.keras needs Keras and one of its backends: pip install keras tensorflow, keras jax or keras torch "
        "(https://keras.io/getting_started)"
    ) from _error

from batchd_client.epoch_passes import EpochPasses
from batchd_client.errors import EpochsUneven, PositionInvalid, ReportInvalid, TensorsInvalid, WorkersInvalid
from batchd_client.loader import checked_fields, own
from batchd_client.stream import Stream
from batchd_client.subscription import StreamState
from batchd_wire.fields import RAGGED

__all__ = ["BatchdPyDataset", "Progress"]

if not hasattr(keras.utils.PyDataset, "on_epoch_begin"):
    raise ImportError(f"batchd_client.keras needs a newer Keras than {keras.__version__}: pip install --upgrade keras")


class BatchdPyDataset(keras.utils.PyDataset):
    """A stream for ``model.fit(photos, epochs=90)`` or ``evaluate``; or index it.

    ``fields``: names, in order; default: all, in tuples without ``index``. ``as_dict``: give dicts
    instead of tuples. Batches are numpy arrays ``[samples, *shape]`` with memory of their own, with
    the dtypes of ``Stream.schema``.

    An epoch's batches come in the stream's order, which is shuffled already: the first index
    requested is the first batch, whatever its number (``fit`` shuffles the numbers unless
    ``shuffle=False``), and the same index is the same batch until the epoch ends. Requesting one
    again is possible, but slow: the stream moves there and back.

    An epoch ends with ``on_epoch_end``, which Keras calls, if all of its batches were requested.

    Raises ``TensorsInvalid`` and, for Keras workers, ``WorkersInvalid``.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        fields: Sequence[str] | None = None,
        as_dict: bool = False,
        workers: int = 1,
        use_multiprocessing: bool = False,
    ) -> None:
        super().__init__()
        self.workers = workers
        self.use_multiprocessing = use_multiprocessing
        self._names = checked_fields(stream.schema, fields, as_dict=as_dict)
        for name in self._names:
            varying = stream.schema[name].varying
            if varying is not None and varying.kind == RAGGED:
                raise TensorsInvalid(
                    f"field {name!r} is ragged, and Keras takes arrays: let the step pad_batch take the place of ragged, or "
                    "leave it out of fields="
                )
        self._as_dict = as_dict
        self._passes = EpochPasses(stream)
        self._lock = Lock()
        self._numbers: dict[int, int] = {}
        """Number of the batch in the pass, by index."""
        self._begins = True
        """The next index begins a pass."""
        self._is_over = False
        """The next index begins a pass over the next epoch."""
        self._is_training = False
        """Between ``on_epoch_begin`` and ``on_epoch_end``."""
        self._announced = len(self)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that it reads."""
        return self._passes.stream

    @property
    def epoch(self) -> int:
        """The epoch of the batches: for ``fit(initial_epoch=)``."""
        return self.stream.epoch if self._is_over else self._passes.present.start.epoch

    def __len__(self) -> int:
        """Batches in this epoch for this rank: fewer than in a whole one after a resume."""
        return self.stream.left if self._is_over else self._passes.present.length

    @property
    def num_batches(self) -> int:
        """As ``len``. Keras reads it each time before it takes batches from the first one on."""
        self._begins = True
        self._announced = len(self)
        return self._announced

    # --- taking batches ---------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Any:
        """Return batch ``index`` of the epoch.

        Raises what iterating a ``Stream`` raises, and ``PositionInvalid`` after the last epoch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        with self._lock:
            if self._begins or self._is_over:
                self._begin(same=not self._is_over)
            number = self._numbers.setdefault(index, len(self._numbers))
            if number != self._passes.taken:
                self._passes.rewind(number)
            batch = self._passes.take()
        if batch is None:
            raise PositionInvalid(
                f"epoch {self.epoch} of stream {self.stream.name!r} is beyond the epochs that it was opened for"
            )
        with batch:
            arrays = [own(batch[name]) for name in self._names]
        return dict(zip(self._names, arrays, strict=True)) if self._as_dict else tuple(arrays)

    def on_epoch_begin(self) -> None:
        """Start of an epoch. Raises ``EpochsUneven`` if Keras would take only part of it."""
        if self._announced != len(self):
            raise EpochsUneven(
                f"Keras goes on with {self._announced} batches in each epoch, as the rest of the resumed one had, and epoch "
                f"{self.epoch} has {len(self)}"
            )
        self._is_training = True

    def on_epoch_end(self) -> None:
        """End of an epoch: begin the next, if all batches of this one were requested."""
        self._is_over |= self._is_training and self._passes.is_over
        self._is_training = False

    def _begin(self, *, same: bool) -> None:
        self._passes.begin(same=same)
        self._numbers.clear()
        self._begins = self._is_over = False

    # --- where it is ------------------------------------------------------------------------------

    def state_dict(self, batches: int | None = None) -> StreamState:
        """Return the state for a checkpoint after the first ``batches`` batches of this epoch.

        Default: after those that a ``Progress`` callback has counted; without one, the epoch's
        beginning.
        """
        if batches is None:
            batches = self._passes.trained or (self._passes.taken if self._is_over else 0)
        return self._passes.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where ``state_dict`` was taken. Raises ``StateMismatch`` without any change."""
        with self._lock:
            self.stream.load_state_dict(state)
            self._begin(same=False)

    # --- what it must not have --------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Always 1: the thread of Keras that asks. Setting more raises ``WorkersInvalid``."""
        return 1

    @workers.setter
    def workers(self, workers: int) -> None:
        if workers not in (0, 1):
            raise WorkersInvalid(f"workers={workers!r}")

    @property
    def use_multiprocessing(self) -> bool:
        """Always False. Setting it to True raises ``WorkersInvalid``."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, use: bool) -> None:
        if use:
            raise WorkersInvalid(f"use_multiprocessing={use!r}")


class Progress(keras.callbacks.Callback):
    """Counts the batches of a stream that ``fit`` has trained on, however far is read ahead.

    For ``BatchdPyDataset`` and ``batchd_client.tensorflow.dataset``; one per stream in a program.
    ``report``: a metric of ``fit``, such as "loss", to be reported of each batch, for `batchd
    blame`. Keras gives its mean over the epoch so far, from which that of the last batch follows:
    of all batches of one execution, with ``steps_per_execution``.
    """

    def __init__(self, stream: Stream, *, report: str | None = None) -> None:
        super().__init__()
        self._passes = EpochPasses(stream)
        self._last = -1
        self._report = report
        self._rows, self._sum = 0, 0.0
        """Of the metric in this epoch: rows that are in it, and their sum."""

    @property
    def epoch(self) -> int:
        """The epoch of the training: for ``fit(initial_epoch=)``."""
        return self.state_dict()["epoch"]

    def state_dict(self) -> StreamState:
        """Return the state for a checkpoint: exactly the batches trained on count as done."""
        return self._passes.state_dict(self._passes.trained)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002  as Keras calls it
        """Keras restarts its count of batches, and its metrics."""
        self._last, self._rows, self._sum = -1, 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Keras has trained up to this batch, one or several in one call.

        Raises ``ReportInvalid`` if there is no such metric as is to be reported.
        """
        before = self._passes.trained
        self._passes.train(batch - self._last)
        self._last = batch
        if self._report is not None:
            self._report_since(before, self._report, logs or {})

    def _report_since(self, trained: int, metric: str, logs: Mapping[str, float]) -> None:
        """Report the mean of the batches behind number ``trained``, by the means of the epoch."""
        if metric not in logs:
            raise ReportInvalid(f"fit has no metric {metric!r} to report: it has {', '.join(logs)}")
        batches = [self._passes.rows(number) for number in range(trained + 1, self._passes.trained + 1)]
        rows = sum(one.rows for one in batches)
        before, self._rows = self._sum, self._rows + rows
        self._sum = float(logs[metric]) * self._rows
        for one in batches:
            self._passes.stream.report_of((self._sum - before) / rows, one)
