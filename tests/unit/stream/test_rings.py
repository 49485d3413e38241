"""The division of memory among the rings, and the error if there is too little."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.core.buckets import buckets_of
from batchd.data.pipeline.image.options import Decode, RandomFlip, RandomResizedCrop
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.samples.columns import Column
from batchd.data.sources.files.options import FolderSource
from batchd.data.storage.access import Storage
from batchd.errors import ConfigInvalid, ExitCode, MemoryTooSmall
from batchd.stream.rings import SLOTS_MAX, bucket_layout, kept_ahead, plan_rings, slot_layout, window_of

MEBIBYTE = 1 << 20
SOURCE = FolderSource(path=Path("/data"))


def config_of(memory: int, **streams: StreamConfig) -> Config:
    return Config(daemon=DaemonConfig(memory=memory), streams=streams)


def stream_of(batch_size: int = 4, memory: int | None = None, **options: Any) -> StreamConfig:
    steps = options.pop("pipeline", (Decode(), RandomResizedCrop(size=(64, 64))))
    return StreamConfig(
        source=FolderSource(path=Path("/data")), pipeline=steps, batch_size=batch_size, memory=memory, **options
    )


def test_streams_share_what_those_with_their_own_memory_leave() -> None:
    """Streams with their own memory come first, and the others share the rest equally."""
    rings = plan_rings(
        config_of(10 * MEBIBYTE, a=stream_of(memory=4 * MEBIBYTE), b=stream_of(), c=stream_of(32)), Storage()
    )

    assert rings["a"].layout.slot_bytes == rings["b"].layout.slot_bytes == 4096 + 49_152 + 4096
    assert rings["a"].slots_max == 4 * MEBIBYTE // rings["a"].layout.slot_bytes
    assert rings["b"].slots_max == 3 * MEBIBYTE // rings["b"].layout.slot_bytes
    assert rings["c"].slots_max == 3 * MEBIBYTE // rings["c"].layout.slot_bytes
    assert sum(ring.ring_bytes for ring in rings.values()) <= 10 * MEBIBYTE


def test_a_ring_is_never_longer_than_its_limit() -> None:
    """More slots would cost descriptors without a benefit."""
    assert plan_rings(config_of(4 << 30, a=stream_of()), Storage())["a"].slots_max == SLOTS_MAX


def test_masked_streams_have_a_field_for_it() -> None:
    """The layout follows the stream's policy."""
    layout = plan_rings(config_of(4 << 30, a=stream_of(on_error="mask")), Storage())["a"].layout

    assert [field.name for field in layout.fields] == ["image", "label", "index", "valid"]


def test_a_stream_of_different_shapes_needs_room_for_the_largest_in_every_row() -> None:
    """If there is too little memory, a smaller maximum is one of the remedies."""
    stream = stream_of(256, pipeline=(Decode(), PadBatch(max_shape=(512, 512, 3))))
    rows_bytes = 256 * (512 * 512 * 3 + 8 + 8 + 8)

    assert plan_rings(config_of(1 << 30, a=stream), Storage())["a"].layout.slot_bytes == 4096 + rows_bytes + 2048
    with pytest.raises(MemoryTooSmall) as caught:
        plan_rings(config_of(300 * MEBIBYTE, a=stream), Storage())

    (problem,) = caught.value.problems
    assert "need 384.1 MiB for 2 slots of 256 samples, have 300.0 MiB" in problem.message
    assert problem.message.endswith(
        'set memory = "385MiB" in [daemon], or a smaller max_shape of image, or a smaller batch_size'
    )


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=60),
    count=st.integers(2, 9),
    batch_size=st.integers(1, 40),
    budget=st.integers(70, 3000),
)
def test_a_slot_with_a_budget_is_never_larger_than_it_was_planned(sizes, count, batch_size, budget) -> None:
    """Before samples are measured, the budget alone says how large a slot can become."""
    bucket = {"field": "tokens", "count": count, "budget": budget}
    pad = PadBatch(field="tokens", max_shape=(64,), too_large="crop")
    stream = StreamConfig.model_validate({"source": SOURCE, "batch_size": batch_size, "bucket": bucket})
    stream = stream.model_copy(update={"pipeline": (pad,)})
    columns = [Column("tokens", dtype="int32", shape=(None,))]
    planned = slot_layout(stream, columns, has_checksums=True)

    layout = bucket_layout(planned, buckets_of(np.array(sizes), count, batch_size, budget=budget))

    assert layout.slot_bytes <= planned.slot_bytes
    assert planned.slot_bytes <= 2 * 4096 + 4 * min(budget + batch_size, 64 * batch_size) + 16 * batch_size + 5 * 64
    assert max(one.rows * one.fields[0].shape[0] for one in layout.buckets) <= budget
    assert layout.field_texts == slot_layout(stream, columns, has_checksums=True).field_texts


def test_memory_for_less_than_two_slots_is_refused_with_the_numbers() -> None:
    """The message has the required and the present amount, and the key to change."""
    with pytest.raises(MemoryTooSmall) as caught:
        plan_rings(
            config_of(3 * MEBIBYTE, big=stream_of(256), small=stream_of(4), own=stream_of(256, memory=MEBIBYTE)),
            Storage(),
        )

    found = {problem.path: problem.message for problem in caught.value.problems}
    assert found.keys() == {"streams.big.memory", "streams.own.memory"}
    assert "need 6.1 MiB for 2 slots of 256 samples, have 1.0 MiB as" in found["streams.big.memory"]
    assert 'set memory = "14MiB" in [daemon]' in found["streams.big.memory"]
    assert 'set memory = "7MiB" in [streams.own]' in found["streams.own.memory"]
    assert caught.value.exit_code == ExitCode.NOT_ENOUGH_MEMORY


def test_the_memory_that_the_message_asks_for_is_enough_and_not_too_much() -> None:
    """The advised amount works at once, and one MiB less is too little."""
    streams = {"big": stream_of(256), "small": stream_of(4), "own": stream_of(4, memory=MEBIBYTE)}

    assert plan_rings(config_of(14 * MEBIBYTE, **streams), Storage())["big"].slots_max == 2
    with pytest.raises(MemoryTooSmall, match=r"need 6.1 MiB .* have 6.0 MiB"):
        plan_rings(config_of(13 * MEBIBYTE, **streams), Storage())


def test_own_memory_beyond_the_daemons_is_refused() -> None:
    """The sum counts, not each stream by itself."""
    with pytest.raises(MemoryTooSmall, match=r'daemon.memory: need 6.0 MiB.*have 5.0 MiB.*"6MiB"'):
        plan_rings(
            config_of(5 * MEBIBYTE, a=stream_of(memory=3 * MEBIBYTE), b=stream_of(memory=3 * MEBIBYTE)), Storage()
        )


def test_steps_that_make_no_sense_are_refused_before_memory_is_counted() -> None:
    """Both errors are reported, with the exit code of the configuration error."""
    with pytest.raises(ConfigInvalid) as caught:
        plan_rings(config_of(MEBIBYTE, a=stream_of(pipeline=(RandomFlip(),)), b=stream_of(256)), Storage())

    assert {problem.path for problem in caught.value.problems} == {"streams.a.pipeline[0]", "streams.b.memory"}
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("batch_size", "workers", "memory", "window"),
    [
        (1, 2, 4 << 30, 64),
        (100, 2, 4 << 30, 13),
        (4096, 2, 4 << 30, 3),
        (4096, 64, 16 << 30, 3),
        (256, 64, 16 << 30, 9),
        (100, 2, 8 * MEBIBYTE, 5),
        (256, 2, 8 * MEBIBYTE, 2),
    ],
    ids=["small", "medium", "large", "large, many workers", "many workers", "little memory", "very little memory"],
)
def test_how_many_batches_are_ahead_is_chosen_by_their_bytes(batch_size, workers, memory, window) -> None:
    """There are more if that keeps all workers busy, up to the slots beside the one being read."""
    stream, daemon = stream_of(batch_size), DaemonConfig(memory=memory, workers=workers)
    ring = plan_rings(Config(daemon=daemon, streams={"a": stream}), Storage())["a"]

    assert window_of(stream, daemon, ring) == window
    assert window_of(stream.model_copy(update={"window": 7}), daemon, ring) == 7


@pytest.mark.parametrize(
    ("batch_size", "memory", "equal_epochs", "batches"),
    [
        (1, None, False, 6553),
        (1024, None, False, 10),
        (4096, None, False, 8),
        (1, MEBIBYTE, False, None),
        (1, None, True, None),
    ],
    ids=["small", "medium", "large", "with memory of its own", "with the same bytes in all epochs"],
)
def test_how_much_is_kept_for_a_trainer_that_is_behind(batch_size, memory, equal_epochs, batches) -> None:
    """Some memory is kept, unless it was set for that, or all epochs read it."""
    stream = stream_of(batch_size, memory)
    ring = plan_rings(config_of(4 << 30, a=stream), Storage())["a"]

    assert kept_ahead(stream, ring, equal_epochs=equal_epochs) == batches
