"""HELPER process, ``python -m batchd.worker.tasks LENGTHS_FD INDEX_FD``: sizes of samples.

A stream with ``pack`` or a bucket plans its batches by the size of each sample, so each sample is
made once before the first batch; of an image that is cut into patches and of an array in a shard,
the header suffices, and of a list of numbers in Parquet, its length.
``stream.measuring`` starts some of these processes and tells each, in JSON on standard input, which
samples are its own. The answer is shared memory, int64 ``[samples]``:

    UNKNOWN --> IN_WORK --> the size; 0: the sample is bad, or has no element

Of a question with ``only``, the memory is for these samples, which `batchd check` tries.

If the process dies, the sample that was IN_WORK ended it. A process that is started again continues
with the UNKNOWN ones. Standard error says in the last line why no sample can be made (status 1).
"""

import json
import mmap
import sys
from typing import TYPE_CHECKING

from batchd.worker.messages import ASPECT_UNIT, BLOCK_SAMPLES, IN_WORK, UNKNOWN, LengthsQuestion, SampleRecipe
from batchd.worker.process import limit_threads, settle_in

if TYPE_CHECKING:  # they import numpy
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from batchd.data.pipeline.options import StepOptions
    from batchd.data.pipeline.shapes.options import Patches
    from batchd.data.samples.columns import Column
    from batchd.data.samples.values import Value
    from batchd.data.storage.access import Storage
    from batchd.data.storage.index import SourceIndex

limit_threads()
EPOCH = 0
VALUE_MAX = 10**12
"""Of a field whose value is the size."""
FIRST_SIDEWAYS = 5
"""Of the EXIF orientations: from here on, width and height are exchanged."""


class SizeInvalid(Exception):  # noqa: N818  names what is wrong
    """A sample has a value that cannot be a size."""


def main() -> int:  # noqa: PLR0915  one sequence
    """Measure; the exit status."""
    settle_in()
    # after the environment is set
    import numpy as np  # noqa: PLC0415

    from batchd.data.functions.load import FunctionUnusable  # noqa: PLC0415
    from batchd.data.pipeline.effects import StepInvalid  # noqa: PLC0415
    from batchd.data.pipeline.kinds import step_from_plain  # noqa: PLC0415
    from batchd.data.storage.access import Storage  # noqa: PLC0415
    from batchd.data.storage.index import SourceIndex  # noqa: PLC0415
    from batchd.data.storage.values import StorageLimits  # noqa: PLC0415
    from batchd.worker.sample_maker import BAD, RecipeUnusable, SampleMaker  # noqa: PLC0415
    from batchd.worker.stopwatch import Stopwatch  # noqa: PLC0415

    asked = LengthsQuestion(**json.load(sys.stdin))
    lengths_descriptor, index_descriptor = map(int, sys.argv[1:])
    lengths = np.frombuffer(mmap.mmap(lengths_descriptor, 0), np.int64)
    storage = Storage(StorageLimits.from_wire(asked.storage))
    storage.as_of_ns = asked.as_of_ns
    try:
        index = SourceIndex.from_descriptor(index_descriptor)
        recipe = SampleRecipe(*asked.recipe)
        if asked.only:
            _try(recipe, index, storage, asked.only, lengths)
            return 0
        maker = SampleMaker(recipe, index, Stopwatch(), storage, has_rows=False)
        column = maker.columns[asked.field]
        patches = _patches_of([step_from_plain(step) for step in recipe.steps], asked.field)
        for first in range(asked.part * BLOCK_SAMPLES, len(index), asked.parts * BLOCK_SAMPLES):
            block = lengths[first : first + BLOCK_SAMPLES]
            unknown = (first + np.flatnonzero(block == UNKNOWN)).tolist()
            if not unknown:
                continue
            if asked.by == "length":
                lengths[unknown[0]] = IN_WORK
                known = maker.lengths(unknown, asked.field)
                lengths[unknown] = np.where(known > 0, known, UNKNOWN)
                unknown = [sample for sample, length in zip(unknown, known.tolist(), strict=True) if not length]
            maker.read_ahead(unknown)
            for sample in unknown:
                lengths[sample] = IN_WORK
                try:
                    if patches is not None:
                        plan = maker.plan(EPOCH, sample)
                        assert plan is not None, "a step decodes"
                        geometry = plan.geometry
                        lengths[sample] = (geometry.height // patches.size) * (geometry.width // patches.size)
                    else:
                        lengths[sample] = _size(column, maker.make(EPOCH, sample)[asked.field], asked.by)
                except SizeInvalid as error:
                    lengths[sample] = UNKNOWN
                    sys.stderr.write(f"{maker.shown_name(sample)}: {error}\n")
                    return 1
                except BAD as error:
                    lengths[sample] = 0
                    sys.stderr.write(f"{maker.shown_name(sample)}: {' '.join(str(error).split())}\n")
    except (FunctionUnusable, StepInvalid, RecipeUnusable) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    return 0


def _try(
    recipe: SampleRecipe,
    index: "SourceIndex",
    storage: "Storage",
    samples: "Sequence[int]",
    made: "NDArray[np.int64]",
) -> None:
    """Make these samples, each as a row of a batch, or as values where a later plan joins them."""
    import numpy as np  # noqa: PLC0415  after the environment is set

    from batchd.worker.sample_maker import SampleMaker  # noqa: PLC0415  the same
    from batchd.worker.stopwatch import Stopwatch  # noqa: PLC0415  the same

    maker = SampleMaker(recipe, index, Stopwatch(), storage, has_rows=False)
    row = None
    if all(column.is_fixed for column in maker.columns.values()):
        row = {name: np.zeros(column.fixed_shape, column.dtype) for name, column in maker.columns.items()}
        maker.close()
        maker = SampleMaker(recipe, index, Stopwatch(), storage)
    for place, sample in enumerate(samples):
        if made[place] == UNKNOWN:
            made[place] = IN_WORK
            bad = (
                maker.make_for(EPOCH, sample, lambda _values: None)
                if row is None
                else maker.make_row(EPOCH, sample, 0, row)
            )
            made[place] = bad is None
            if bad is not None:
                sys.stderr.write(f"{maker.shown_name(sample)}: {' '.join(bad.split())}\n")


def _patches_of(steps: "list[StepOptions]", field: str) -> "Patches | None":
    """The step that cuts ``field``, if all steps on it are planned from the header of a file."""
    from batchd.data.pipeline.image.options import Decode, ImageStep  # noqa: PLC0415  after the environment is set
    from batchd.data.pipeline.image.stages import can_join  # noqa: PLC0415
    from batchd.data.pipeline.shapes.options import Patches  # noqa: PLC0415

    on_field = [step for step in steps if field in (step.changes or {field})]
    first = next((place for place, step in enumerate(steps) if isinstance(step, ImageStep)), 0)
    run = [step for step in steps[first : first + len(on_field) - 1] if isinstance(step, ImageStep)]
    is_planned = bool(run) and run == on_field[:-1] and isinstance(run[0], Decode) and all(map(can_join, run, run[1:]))
    return on_field[-1] if is_planned and isinstance(on_field[-1], Patches) else None


def _size(column: "Column", value: "Value", by: str) -> int:
    """The size of a sample, at least 0. Raises ``SampleUndecodable`` and ``SizeInvalid``."""
    from batchd.data.pipeline.image.probe import probe_image  # noqa: PLC0415  after the environment is set
    from batchd.data.samples.values import array_of  # noqa: PLC0415

    if by == "length":
        return len(array_of(column, value))
    if by == "bytes":
        stored = value.encode() if isinstance(value, str) else value
        return len(stored) if isinstance(stored, (bytes, memoryview)) else array_of(column, stored).nbytes
    if by == "value":
        number = float(array_of(column, value))
        if not 0 < number <= VALUE_MAX:  # nor NaN
            raise SizeInvalid(f"{column.name!r} is {number:g}: a size is a number above 0, and at most {VALUE_MAX:g}")
        return max(1, round(number * ASPECT_UNIT))
    if isinstance(value, memoryview):
        header = probe_image(value)
        height, width = header.height, header.width
        if header.orientation >= FIRST_SIDEWAYS:
            height, width = width, height
    else:
        height, width = array_of(column, value).shape[:2]
    if by == "pixels":
        return height * width
    return max(1, width * ASPECT_UNIT // height) if height * width else 0


if __name__ == "__main__":
    sys.exit(main())
