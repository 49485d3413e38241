"""batchd in TensorFlow 2.16 or newer: a stream as a ``tf.data.Dataset``. Runs in the trainer.

    from batchd_client.tensorflow import dataset

    photos = dataset(batchd_client.connect().stream("photos")).prefetch(2)
    for epoch in range(90):
        for images, labels in photos:              # tensors of one's own
            ...

``model.fit(photos, epochs=90)`` is the same; for Keras without TensorFlow see
``batchd_client.keras``.
"""

import atexit
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

try:
    import tensorflow as tf
except ImportError as _error:
    raise ImportError(
        "batchd_client.tensorflow needs TensorFlow: pip install tensorflow (https://www.tensorflow.org/install)"
    ) from _error

from batchd_client.batch import Batch
from batchd_client.epoch_passes import EpochPasses
from batchd_client.errors import TensorsInvalid
from batchd_client.loader import RankShare, checked_fields, own
from batchd_client.stream import FieldSchema, Stream
from batchd_client.subscription import StreamState
from batchd_wire.fields import RAGGED
from batchd_wire.views import Array

__all__ = ["dataset", "report", "share", "state_after"]

F = TypeVar("F", bound=Callable[..., object])
FIRST, OVER = -1, -2
"""Turns without a pass (see ``epoch_passes``): not begun yet, and without batches."""


def dataset(stream: Stream, *, fields: Sequence[str] | None = None, as_dict: bool = False) -> tf.data.Dataset:
    """Make a dataset of a stream.

    Each iteration reads the rest of an epoch; the next, the next epoch. ``fields``: names, in
    order; default: all, in tuples without ``index``. ``as_dict``: give dicts instead of tuples.
    Tensors are ``[samples, *shape]`` with the dtypes of ``Stream.schema``. A padded field is cut to
    the largest sample of the batch, a ragged one is a ``tf.RaggedTensor``.

    An iteration abandoned before the epoch's last batch does not count, as always with tf.data: the
    next one gives the same batches again. The dataset's length is that of a whole epoch, also after
    a resume.

    Iterating raises what iterating a ``Stream`` raises, as TensorFlow passes it on. Raises
    ``TensorsInvalid``.
    """
    _end_with_the_program()
    columns = [_column(name, stream.schema[name]) for name in checked_fields(stream.schema, fields, as_dict=as_dict)]
    empty = [array for one in columns for array in one.empty]
    passes = EpochPasses(stream)
    # TensorFlow never lets go of a function of Python, so only the data set holds the stream;
    # within a graph there is none.
    reachable = ref(passes) if tf.executing_eagerly() else lambda: passes

    def give(values: list[Any]) -> Any:
        return {one.name: value for one, value in zip(columns, values, strict=True)} if as_dict else tuple(values)

    def take(turn: int) -> list[object]:
        passes = reachable()
        if passes is None or turn == OVER:
            return [OVER, False, *empty]
        turn = passes.begin() if turn == FIRST else int(turn)
        batch = passes.take(turn)
        if batch is None:
            return [turn, False, *empty]
        with batch:
            return [turn, True, *(array for one in columns for array in one.read(batch))]

    def step(turn: Any, _: Any) -> Any:
        turn, more, *arrays = tf.numpy_function(take, [turn], [tf.int64, tf.bool, *(array.dtype for array in empty)])
        parts = iter(arrays)
        return tf.ensure_shape(turn, []), (tf.ensure_shape(more, []), give([one.tensor(parts) for one in columns]))

    def batches(turn: int) -> tf.data.Dataset:
        steps = tf.data.Dataset.from_tensors(0).repeat().scan(np.int64(turn), _as_it_is(step))
        has_more: Any = _as_it_is(lambda more, _: more)
        taken = steps.take_while(has_more)
        # Not by ``map``, which TensorFlow makes parallel by itself: then it would read ahead
        # unasked.
        return taken.scan(0, _as_it_is(lambda state, element: (state, element[1])))

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Keras goes by the length, which is that of an infinite data set's first elements:
    # ``assert_cardinality`` would end the training where there are fewer. What makes it infinite,
    # as far as TensorFlow can tell, has no elements.
    data = batches(FIRST).concatenate(batches(OVER).repeat()).take(len(stream)).with_options(options)
    vars(data)["_batchd_passes"] = passes
    return data


@cache
def _end_with_the_program() -> None:
    """Drop tf.data's iterators before the interpreter ends, wherever they are kept.

    An iterator that reads ahead waits at its end for its thread, and that thread waits forever for
    a Python that has ended.
    """
    atexit.register(_let_go_of_iterators)


def _let_go_of_iterators() -> None:
    for one in gc.get_objects():
        if tf.data.Iterator in type(one).__mro__:
            vars(one).clear()


def state_after(stream: Stream, batches: int) -> StreamState:
    """Return the state after the first ``batches`` batches of a dataset's present iteration.

    The loop counts them: ``for done, batch in enumerate(photos, 1): ...; save(state_after(stream,
    done))``. ``stream.state_dict()`` counts what TensorFlow has taken, which is more if something
    reads ahead of the loop.
    """
    return EpochPasses(stream).state_dict(batches)


def report(stream: Stream, batches: int, values: object) -> None:
    """Report one number for a batch, or one for each of its rows; see ``Stream.report``.

    ``batches``: its number in the dataset's present iteration, from 1: ``for done, batch in
    enumerate(photos, 1): ...; report(stream, done, losses)``. ``stream.report()`` would be about
    the batch that TensorFlow took last. A tensor of a GPU is waited for. Raises ``ReportInvalid``,
    also for a tensor within a graph, and ``StreamClosed``.
    """
    stream.report_of(values, EpochPasses(stream).rows(batches))


def share(context: tf.distribute.InputContext) -> RankShare:
    """Return the rank of a strategy's input pipeline: one pipeline for each of its processes.

    ``strategy.distribute_datasets_from_function`` gives the context to your function, which returns
    ``dataset(daemon.stream("photos", *share(context)))``.
    """
    return RankShare(context.input_pipeline_id, context.num_input_pipelines)


class _Column(NamedTuple):
    """One field of the loop's item: its reader, its arrays without samples, and its tensor."""

    name: str
    read: Callable[[Batch], Sequence[Array]]
    empty: tuple[Array, ...]
    tensor: Callable[[Iterator[Any]], Any]


def _column(name: str, schema: FieldSchema) -> _Column:
    """Plan a field's tensor. Raises ``TensorsInvalid``."""
    try:
        tf.dtypes.as_dtype(schema.dtype)
    except TypeError:
        raise TensorsInvalid(f"field {name!r} is {schema.dtype.name}, which TensorFlow does not have") from None
    axes = schema.varying.axes if schema.varying is not None else ()
    shape = [None, *(None if axis in axes else length for axis, length in enumerate(schema.shape))]
    if schema.varying is None or schema.varying.kind != RAGGED:
        empty = np.empty((0, *schema.shape), schema.dtype)
        return _Column(
            name, lambda batch: [own(batch[name])], (empty,), lambda parts: tf.ensure_shape(next(parts), shape)
        )
    if axes != (0,):
        raise TensorsInvalid(
            f"field {name!r} is ragged in dimensions {', '.join(map(str, axes))} of its samples, and a RaggedTensor can be "
            "made where only their first one varies: let the step pad_batch take the place of ragged, or leave it out of fields="
        )
    ragged_tensor: Any = tf.RaggedTensor  # whose types lack its constructors

    def tensor(parts: Iterator[Any]) -> Any:
        values, row_splits = tf.ensure_shape(next(parts), shape[1:]), tf.ensure_shape(next(parts), [None])
        return ragged_tensor.from_row_splits(values, row_splits, validate=False)

    empty = np.empty((0, *schema.shape[1:]), schema.dtype)
    return _Column(name, lambda batch: batch.ragged(name).compact(), (empty, np.zeros(1, np.int64)), tensor)


def _as_it_is(function: F) -> F:
    kept: F = tf.autograph.experimental.do_not_convert(function)
    return kept
