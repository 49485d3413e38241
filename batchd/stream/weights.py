"""The weights of a stream's samples, and the moments at which those of a mix change. Daemon, CLI.

weights = { by = "class", power = 0.5 }    samples of a class ** 0.5, dealt to its samples
weights = "weights.npy"                    as the file says
source.weights = { "0" = ..., ... }        batches and epochs as rows of the run
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchd.config.tree import Weights
from batchd.core.draws import SINGLE_MAX
from batchd.core.mixtures import Segment
from batchd.data.sources.arrays.index import read_array
from batchd.data.sources.composed.options import MixSource, moment_of
from batchd.data.sources.interface import kind_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.index import SourceIndex
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted

FILE_BYTES_MAX = 16 << 30


def weights_of(wanted: Weights, source: SourceOptions, index: SourceIndex) -> NDArray[np.float64]:
    """Return the weight of each sample: float64 ``[samples]``, 0 or more, and not all 0.

    Raises ``SourceInvalid``.
    """
    weights = _from_file(wanted.file, len(index)) if wanted.file else _by_class(wanted.power, source, index)
    drawn = int(np.count_nonzero(weights))
    if not drawn:
        raise SourceInvalid("all weights are 0, so no sample can be drawn")
    if not wanted.replacement:
        assert wanted.samples is not None, "its table requires it"
        if wanted.samples > drawn:
            raise SourceInvalid(
                f"samples = {wanted.samples} cannot be drawn without replacement from {counted(drawn, 'sample')} with a weight "
                "above 0; set fewer, or replacement = true"
            )
        if len(index) > SINGLE_MAX:
            raise SourceInvalid(
                f"without replacement each epoch's draw looks at all samples, at most {SINGLE_MAX:,}, and there are "
                f"{len(index):,}; use replacement = true"
            )
    return weights


def _by_class(power: float, source: SourceOptions, index: SourceIndex) -> NDArray[np.float64]:
    labels = kind_of(source).labels(source, index)
    if labels is None:
        raise SourceInvalid(
            'by = "class" needs labels in the index, and the index of this source has none: they are read with each sample; '
            "name a file of weights instead"
        )
    _classes, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # digits that are the same on every machine
    by_class = [float(f"{count ** (power - 1):.9g}") for count in counts.tolist()]
    return np.asarray(by_class, np.float64)[class_of]


def _from_file(file: Path, samples: int) -> NDArray[np.float64]:
    try:
        with file.open("rb") as stream:
            stored = read_array(str(file), stream)
            stream.seek(0)
            content = stream.read(FILE_BYTES_MAX)
    except OSError as error:
        raise SourceInvalid(f"{file}: {error.strerror}") from None
    stored.check_end(str(file), len(content))
    if stored.shape != (samples,) or stored.dtype.kind not in "fiu":
        raise SourceInvalid(
            f"{file} holds {stored.dtype}{list(stored.shape)}, and the source has {counted(samples, 'sample')}: save a number "
            "for each"
        )
    weights = stored.numbers(str(file), memoryview(content)).astype(np.float64)
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        raise SourceInvalid(f"{file}:{wrong[0]}: {weights[wrong[0]]:g} is no weight; weights are 0 or more")
    return weights


def segments_of(source: MixSource, batch_size: int, rows: int, *, drop_last: bool) -> list[Segment]:
    """Return the shares of a mix by the row of the run from which they count.

    ``rows``: of an epoch. Raises ``SourceInvalid`` for two that begin with the same row.
    """
    assert isinstance(source.weights, dict), "its weights change"
    steps = max(1, rows // batch_size if drop_last else -(-rows // batch_size))
    found = {}
    for text, weights in source.weights.items():
        moment = moment_of(text)
        assert moment is not None, "its table has read it"
        number, counts_epochs = moment
        epoch, step = (number, 0) if counts_epochs else divmod(number, steps)
        found[text] = Segment(epoch * rows + min(step * batch_size, rows), weights)
    ordered = sorted(found.items(), key=lambda one: one[1].first)
    for (before, one), (behind, other) in pairwise(ordered):
        if one.first == other.first:
            raise SourceInvalid(
                f"source.weights: {before!r} and {behind!r} are the same moment, batch 0 of epoch {one.first // rows}: an epoch "
                f"has {counted(steps, 'batch')}"
            )
    return [segment for _text, segment in ordered]
