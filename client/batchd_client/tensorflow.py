"""batchd in TensorFlow: a stream as a ``tf.data.Dataset``. Runs in the trainer; needs TensorFlow 2.16 or newer.

    from batchd_client.tensorflow import dataset

    photos = dataset(batchd_client.connect().stream("photos")).prefetch(2)
    for epoch in range(90):
        for images, labels in photos:              # tensors of one's own
            ...

``model.fit(photos, epochs=90)`` is the same; for Keras without TensorFlow see ``batchd_client.keras``.
"""

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

try:
    import tensorflow as tf
except ImportError as _error:
    raise ImportError(
        "batchd_client.tensorflow needs TensorFlow: pip install tensorflow (https://www.tensorflow.org/install)"
    ) from _error

from batchd_client.batch import Batch
from batchd_client.columns import own, wanted
from batchd_client.errors import TensorsInvalid
from batchd_client.passes import Passes
from batchd_client.positions import StreamState
from batchd_client.ranks import Share
from batchd_client.stream import FieldSchema, Stream
from batchd_wire.fields import RAGGED

__all__ = ["dataset", "share", "state_after"]


def dataset(stream: Stream, *, fields: Sequence[str] | None = None, as_dict: bool = False) -> tf.data.Dataset:
    """Make a data set of a stream. Each iteration over it gives the rest of an epoch, and the next one the next epoch.

    ``fields``: which, in which order; default: all, in tuples without ``index``. ``as_dict``: give dicts and not tuples.
    A padded field is cut to the largest sample of the batch, a ragged one is a ``tf.RaggedTensor``.

    An iteration that is left before the epoch's last batch was taken counts for nothing, as always with tf.data: the next one
    gives the same batches again. The length of the data set is that of a whole epoch; of one that was resumed there is less.

    Iterating raises what iterating a ``Stream`` raises, as TensorFlow passes it on. Raises ``TensorsInvalid``.
    """
    _end_with_the_program()
    columns = [_column(name, stream.schema[name]) for name in wanted(stream.schema, fields, as_dict=as_dict)]
    passes = Passes(stream)

    def give(values: list[Any]) -> Any:
        return {one.name: value for one, value in zip(columns, values, strict=True)} if as_dict else tuple(values)

    def batches() -> Iterator[Any]:
        turn = passes.begin()
        while (batch := passes.take(turn)) is not None:
            with batch:
                values = [one.read(batch) for one in columns]
            yield give(values)

    rest = tf.data.Dataset.from_generator(batches, output_signature=give([one.spec for one in columns]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return _at_most(rest, len(stream)).with_options(options)


@cache
def _end_with_the_program() -> None:
    """Let go of a data set that an uncaught exception left half read, before the interpreter goes.

    Its traceback would keep TensorFlow's iterator until there is no Python any more, for which the iterator's own end waits: any
    ``from_generator`` hangs there.
    """
    atexit.register(_forget_last_exception)


def _forget_last_exception() -> None:
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)


def state_after(stream: Stream, batches: int) -> StreamState:
    """Tell what a checkpoint needs to go on behind the first ``batches`` of the present iteration over a stream's data set.

    The loop counts them: ``for done, batch in enumerate(photos, 1): ...; save(state_after(stream, done))``, since
    ``stream.state_dict()`` is about what TensorFlow has taken, which is more wherever something reads ahead of the loop.
    """
    return Passes(stream).state_dict(batches)


def share(context: tf.distribute.InputContext) -> Share:
    """Tell which share of a stream belongs to an input pipeline of a strategy: one pipeline for each of its processes.

    strategy.distribute_datasets_from_function(lambda context: dataset(daemon.stream("photos", *share(context))))
    """
    return Share(context.input_pipeline_id, context.num_input_pipelines)


class _Column(NamedTuple):
    """One field of what the loop gets: its type for TensorFlow, and how it is read."""

    name: str
    spec: tf.TypeSpec
    read: Callable[[Batch], Any]


def _column(name: str, schema: FieldSchema) -> _Column:
    """How a field becomes a tensor. Raises ``TensorsInvalid``."""
    try:
        dtype = tf.dtypes.as_dtype(schema.dtype)
    except TypeError:
        raise TensorsInvalid(f"field {name!r} is {schema.dtype.name}, which TensorFlow does not have") from None
    axes = schema.varying.axes if schema.varying is not None else ()
    shape = [None, *(None if axis in axes else length for axis, length in enumerate(schema.shape))]
    if schema.varying is None or schema.varying.kind != RAGGED:
        return _Column(name, tf.TensorSpec(shape, dtype), lambda batch: own(batch[name]))
    if axes != (0,):
        raise TensorsInvalid(
            f"field {name!r} is ragged in dimensions {', '.join(map(str, axes))} of its samples, and a RaggedTensor can be "
            "made where only their first one varies: let the step pad_batch take the place of ragged, or leave it out of fields="
        )
    spec = tf.RaggedTensorSpec(shape, dtype, ragged_rank=1, row_splits_dtype=tf.int64)
    ragged_tensor: Any = tf.RaggedTensor  # whose types lack its constructors
    return _Column(name, spec, lambda batch: ragged_tensor.from_row_splits(*batch.ragged(name).compact()))


def _at_most(rest: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Let a data set say that it has so many elements, though it may have fewer; Keras goes by what it says.

    ``assert_cardinality`` would end the training where there are fewer. Here an empty one comes behind it that is infinite as far
    as TensorFlow can tell; so the whole is infinite too, and ``take`` makes of that the number.
    """
    nothing = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=rest.element_spec)
    return rest.concatenate(nothing.repeat()).take(length)
