"""The inputs of a stream's fingerprint: everything that decides bytes, and nothing else."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from batchd.config.tree import Erasing, Mark, Mix, StreamConfig, Weights, keys_marked
from batchd.core.draws import EvenDraws, bounds_of
from batchd.core.plan import Plan
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.pipeline.views.options import View
from batchd.data.sources.files.options import FolderSource
from batchd.data.sources.interface import kind_of
from batchd.data.storage.access import Storage
from batchd.stream.fingerprints import FINGERPRINT_DIGITS, fingerprint
from batchd.stream.plan import StreamCode, StreamPlan
from batchd.stream.served import content_of
from support.configs import load
from support.steps import op

STEPS = (
    op("pack", field="tokens", length=8),  # no random step may be before it
    op("decode"),
    op("resize", shorter_side=40),
    op("center_crop", size=(36, 36)),
    op("random_resized_crop", size=(32, 32)),
    op("random_flip"),
    op("normalize"),
    op("layout"),
    op("one_hot", classes=10),
    op("cast", dtype="float32"),
    op("clip", min=0, max=9),
    op("scale"),
    op("drop", fields=("extra",)),
    op("rename", field="name", to="text"),
    op("tokenize", file=Path("/a"), max_length=8),
    op("pick", field="captions"),
    op("chat", tokenizer=Path("/a"), template="chatml", max_length=8),
    op("lowercase"),
    op("remove_stopwords", file=Path("/a")),
    op("lookup", words=Path("/a"), table=Path("/b"), max_words=8),
    op("text_bytes", length=8),
    op("pad_batch", max_shape=(32, 32, 3)),
    op("ragged", max_shape=(32, 32, 3)),
    op("patches", size=14),
    op("interleave", image_token=3, size=14),
    op("follow", mask="mask", boxes="some", keypoints="joints"),
    op("map_ids", table={"7": 0}),
    op("box_form", form="cxcywh"),
    op("random_crop", size=(32, 32)),
    op("pad", border=(0, 0, 0, 0)),
    op("rotate", degrees=(-5.0, 5.0)),
    op("color_jitter"),
    op("gray"),
    op("cutout", size=(8, 8)),
    op("letterbox", size=(32, 32)),
    op("solarize"),
    op("posterize"),
    op("equalize"),
    op("autocontrast"),
    op("invert"),
    op("sharpen"),
    op("blur"),
    op("erase"),
    op("affine"),
    op("perspective"),
    op("elastic"),
    op("rand_augment"),
    op("trivial_augment"),
    op("auto_augment"),
    op("augmix"),
    op("choose", of=(op("blur"), op("invert"))),
    op("mosaic", size=(8, 8)),
    op("mixup"),
    op("copy_paste"),
    op("subtract_mean"),
    op("to"),
    op("call", function="a:b"),
    op("decode_video", frames=4, fps=8.0),
    op("decode_audio", rate=16000, seconds=1.5),
    op("views", into={"a": View(steps=(op("gray"),))}),
)
PROBABILITY: Mapping[str, object] = {"probability": 0.25}
WARPED: Mapping[str, object] = {"interpolation": "nearest", "fill": (1,), **PROBABILITY}
SPECTRUM: Mapping[str, object] = {
    "n_fft": 500,
    "window_length": 300,
    "hop": 80,
    "window": "hamming",
    "edges": "cut",
    "drop_last": True,
    "remove_mean": True,
    "preemphasis": 0.5,
    "power": 1,
    "log": "log10",
    "floor": 1e-9,
    "top": 8.0,
}
BANDS: Mapping[str, object] = {
    "rate": 18_000,
    "bands": 40,
    "low_hz": 20.0,
    "high_hz": 7000.0,
    "scale": "slaney",
    "norm": True,
}
FROM_FOLDER = {
    "root": Path("/c"),
    "patterns": ("**/*.wav",),
    "rate": 8000,
    "quality": "fast",
    "formats": ("wav", "mp3"),
    "probability": 0.5,
}
OTHER_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "decode": {"color": "bgr", "exif": "ignore", "scale": "off", "max_pixels": 1, "max_bytes": 1},
    "resize": {"shorter_side": 41, "max_longer_side": 99, "multiple_of": 2, "interpolation": "area"},
    "center_crop": {"size": (36, 35), "place": (0.0, 1.0), **PROBABILITY},
    "random_resized_crop": {
        "size": (32, 31),
        "scale": (0.1, 1.0),
        "ratio": (0.5, 2.0),
        "interpolation": "cubic",
        **PROBABILITY,
    },
    "random_flip": {"probability": 0.25, "direction": "vertical"},
    "normalize": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "dtype": "float16"},
    "layout": {"order": "nhwc"},
    "one_hot": {"classes": 11, "dtype": "uint8"},
    "cast": {"dtype": "uint8", "truncate": True},
    "clip": {"min": 1, "max": 8},
    "scale": {"factor": 2.0, "offset": 1.0, "dtype": "float16"},
    "drop": {"fields": ("extra", "more")},
    "rename": {"to": "caption"},
    "tokenize": {
        "to": "ids",
        "file": Path("/c"),
        "max_length": 9,
        "padding": "none",
        "truncation": False,
        "pad_id": 1,
        "special_tokens": False,
    },
    "pick": {"which": "first"},
    "chat": {
        "to": "numbers",
        "mask": "learned",
        "tools": "tools",
        "tokenizer": Path("/b"),
        "template": Path("/c"),
        "loss": ("user",),
        "max_length": 9,
        "truncate": "left",
        "special_text": "parse",
        "image": "<image>",
        "generation_prompt": True,
    },
    "lowercase": {},
    "trim": {"top_db": 30.0, "frame": 400, "hop": 160},
    "add_noise": FROM_FOLDER | {"snr_db": (0.0, 10.0)},
    "room": FROM_FOLDER | {"normalize": "energy", "max_seconds": 1.0},
    "remove_stopwords": {"file": Path("/c"), "case": "exact"},
    "lookup": {
        "to": "rows",
        "words": Path("/c"),
        "table": Path("/d"),
        "max_words": 9,
        "unknown": "zeros",
        "truncation": False,
    },
    "text_bytes": {"length": 9, "truncation": False},
    "pad_batch": {"max_shape": (32, 31, 3), "fill": 1.0, "too_large": "crop"},
    "pack": {
        "length": 9,
        "too_long": "drop",
        "documents": 3,
        "window": 5,
        "fill": 1.0,
        "ids": False,
        "method": "concat-split",
        "patches": 9,
    },
    "patches": {"size": 15},
    "interleave": {"images": "pictures", "image_token": 4, "size": 15, "also": ("mask",), "merge": 2},
    "ragged": {"max_shape": (32, 31, 3), "too_large": "crop"},
    "follow": {
        "mask": "other mask",
        "mask_fill": 255,
        "boxes": "boxes",
        "points": "points",
        "labels": ("classes",),
        "keep_empty": True,
        "min_visible": 0.5,
        "mask_type": "int32",
        "masks": "masks",
        "form": "xywh",
        "relative": True,
        "annotated": "stored",
        "min_area": 4.0,
        "keypoints": "others",
        "flip_indices": (1, 0),
    },
    "map_ids": {"table": {"7": 1}, "ignore": 255},
    "box_form": {"image": "other", "form": "xywh", "relative": True},
    "random_crop": {"size": (32, 31), "padding": 4, "fill": (1,), **PROBABILITY},
    "pad": {"border": (0, 0, 0, 1), "place": "top_left", "fill": (1,)},
    "rotate": {"degrees": (-6.0, 5.0), "interpolation": "nearest", "fill": (1,), **PROBABILITY},
    "color_jitter": {"brightness": 0.5, "contrast": 0.5, "saturation": 0.5, "hue": 0.5, **PROBABILITY},
    "gray": {"channels": 1, **PROBABILITY},
    "cutout": {"holes": 2, "size": (8, 7), "fill": (1,), **PROBABILITY},
    "crop_to_bucket": {
        "pixels": 131072,
        "multiple_of": 32,
        "ratio": (0.25, 2.0),
        "random": True,
        "interpolation": "area",
    },
    "letterbox": {"size": (32, 31), "enlarge": False, "place": "top_left", "interpolation": "area", "fill": (1,)},
    "solarize": {"threshold": 1, **PROBABILITY},
    "posterize": {"bits": 1, **PROBABILITY},
    "equalize": PROBABILITY,
    "autocontrast": PROBABILITY,
    "invert": PROBABILITY,
    "sharpen": {"factor": (0.5, 1.0), **PROBABILITY},
    "blur": {"sigma": (0.5, 1.0), **PROBABILITY},
    "erase": {"area": (0.1, 0.2), "aspect": (1.0, 2.0), "count": 2, "fill": "noise", **PROBABILITY},
    "affine": {
        "degrees": (-1.0, 1.0),
        "translate": (0.5, 0.0),
        "scale": (1.0, 2.0),
        "shear_x": (0.0, 1.0),
        "shear_y": (0.0, 1.0),
        "size": (8, 7),
        **WARPED,
    },
    "perspective": {"distortion": 0.25, **WARPED},
    "elastic": {"alpha": 1.0, "sigma": 1.0, **WARPED},
    "rand_augment": {"count": 1, "magnitude": 1.0, "deviation": 1.0, "operation_probability": 1.0, **WARPED},
    "trivial_augment": WARPED,
    "auto_augment": {"policy": "svhn", **WARPED},
    "augmix": {"severity": 1, "width": 1, "depth": 1, **WARPED},
    "choose": {"of": (op("blur", sigma=(1, 2)), op("invert")), "weights": (1.0, 2.0), **PROBABILITY},
    "spectrogram": SPECTRUM,
    "log_mel": {**SPECTRUM, **BANDS},
    "mfcc": {**SPECTRUM, **BANDS, "log": "ln", "top": 60.0, "coefficients": 13},
    "mosaic": {"size": (8, 7), "fill": (1,), "until_epoch": 90, "near": 8, **PROBABILITY},
    "mixup": {"alpha": 8, "until_epoch": 90, "near": 8, **PROBABILITY},
    "copy_paste": {
        "paste": "mirrored",
        "fraction": 0.25,
        "max_overlap": 0.5,
        "until_epoch": 90,
        "near": 8,
        **PROBABILITY,
    },
    "normalize_loudness": {"level_db": -10.0, "of": "peak"},
    "gain": {"db": (-1.0, 2.0), **PROBABILITY},
    "speed": {"factors": (0.5, 1.0), **PROBABILITY},
    "spec_augment": {
        "time_masks": 1,
        "time_width": 9,
        "time_share": 0.5,
        "frequency_masks": 1,
        "frequency_width": 9,
        "fill": -1.0,
        **PROBABILITY,
    },
    "subtract_mean": {"mean": (1.0, 2.0, 3.0), "scale": 0.5},
    "to": {"dtype": "uint8", "scale": False, "layout": "nhwc"},
    "call": {"function": "a:c", "outputs": {"score": "float32"}, "random": False},
    "decode_audio": {
        "rate": 8000,
        "channels": 2,
        "seconds": 2.0,
        "start": "middle",
        "short": "bad",
        "max_seconds": 2.0,
        "max_bytes": 1 << 20,
        "dtype": "int16",
        "quality": "fast",
        "formats": ("wav",),
    },
    "views": {"into": {"a": View(steps=(op("gray", probability=0.5),))}},
    "decode_video": {
        "frames": 5,
        "fps": 9.0,
        "start": "uniform",
        "clips": 2,
        "short": "bad",
        "into": "frames",
        "times": "seconds",
        "audio": "sound",
        "audio_rate": 8000,
        "audio_channels": 2,
        "audio_quality": "fast",
        "no_audio": "zeros",
        "color": "bgr",
        "rotation": "ignore",
        "max_pixels": 1,
        "max_bytes": 1,
        "codecs": ("h264",),
    },
}
WITHOUT_FIELD = {"drop", "call"}
OTHER_WAYS = {
    "resize": {"size", "sizes", "shorter_sides", "longer_side", "max_pixels", "min_pixels"},
    "letterbox": {"sizes"},
    "pad": {"size"},
    "rotate": {"quarter_turns"},
    "crop_to_bucket": {"sizes"},
    "map_ids": {"file"},
    "decode_video": {"stride"},
}
"""Options that exclude others, which the steps above have."""
SOUND_STEPS = (
    *(
        op("spectrogram"),
        op("log_mel"),
        op("mfcc"),
        op("normalize_loudness"),
        op("gain"),
        op("speed"),
        op("spec_augment"),
        op("trim"),
    ),
    *(op("add_noise", root=Path("/a")), op("room", root=Path("/b"))),
)
WITHOUT_PACK = tuple(step for step in STEPS if step.op != "pack")
DECIDE_BYTES = {"batch_size": 5, "seed": 1, "shuffle": False, "drop_last": True, "on_error": "fail", "repeats": 2}
DECIDE_TIME = {
    "window": 9,
    "lag": "lockstep",
    "max_bad_fraction": 0.5,
    "storage_away_s": 5.0,
    "memory": 1 << 20,
    "verify": True,
}
BASE = {"source": FolderSource(path=Path("/data")), "pipeline": STEPS, "batch_size": 4}
DIGEST = "5e" * 32
DIGESTS = {Path("/") / name: name * 64 for name in "abcd"}
"""Digests of the files that steps read."""


def fingerprint_with(digest: str = DIGEST, digests: Mapping[Path, str] = DIGESTS, **changes: object) -> str:
    return fingerprint(content_of(plan_of(StreamConfig(**BASE | changes), digests), digest))


def test_ranks_that_draw_one_size_change_the_fingerprint() -> None:
    """Without sizes to draw, balance is refused, or it orders samples, which counts by itself."""
    steps = (op("decode"), op("letterbox", sizes=((8, 8), (16, 16))))
    assert len({fingerprint_with(pipeline=steps, balance=ranks) for ranks in (None, 2, 4)}) == 3


def plan_of(
    config: StreamConfig, digests: Mapping[Path, str] = DIGESTS, modules: Mapping[str, str] = MappingProxyType({})
) -> StreamPlan:
    """The plan of a stream; it reads no data."""
    columns = kind_of(config.source).columns(config.source, Storage())
    pipeline = plan_pipeline(config.pipeline, config.cache, config.cache_short_side)
    return StreamPlan("a", config, columns, pipeline, digests, StreamCode((), dict(modules)), runs_own_code=False)


def test_every_option_of_every_step_changes_the_fingerprint() -> None:
    """All of them give different fingerprints; this test fails first for a forgotten new option."""
    pipelines = STEPS, SOUND_STEPS, (op("crop_to_bucket", pixels=65536),)
    seen = {fingerprint_with(pipeline=steps) for steps in pipelines}
    for steps, place, step in [(whole, *one) for whole in pipelines for one in enumerate(whole)]:
        options = OTHER_OPTIONS[step.op] | ({"field": "other"} if step.op not in WITHOUT_FIELD else {})
        assert options.keys() | {"op"} == {field.name for field in fields(step)} - OTHER_WAYS.get(step.op, set())
        seen |= {
            fingerprint_with(pipeline=(*steps[:place], replace(step, **{name: value}), *steps[place + 1 :]))
            for name, value in options.items()
        }

    assert OTHER_OPTIONS.keys() == STEP_KINDS.keys()
    with_field = len(OTHER_OPTIONS.keys() - WITHOUT_FIELD)
    assert len(seen) == len(pipelines) + with_field + sum(map(len, OTHER_OPTIONS.values()))


def test_saying_what_holds_anyway_changes_no_fingerprint() -> None:
    """Boxes keep their places without labels, and leave with them."""
    for usual, said in (
        (op("follow", boxes="b"), op("follow", boxes="b", keep_empty=True)),
        (op("follow", boxes="b", labels=("c",)), op("follow", boxes="b", labels=("c",), keep_empty=False)),
    ):
        assert fingerprint_with(pipeline=(op("decode"), usual)) == fingerprint_with(pipeline=(op("decode"), said))


def test_the_order_and_the_number_of_steps_change_the_fingerprint() -> None:
    """A crop before a resize gives another image than a crop after it."""
    steps = [STEPS, (STEPS[0], STEPS[2], STEPS[1], *STEPS[3:]), STEPS[:-1], (*STEPS[:2], *STEPS[3:])]
    sized = [(op("decode"), op("resize", size=(32, 32))), (op("decode"), op("resize", shorter_side=32))]

    assert len({fingerprint_with(pipeline=pipeline) for pipeline in [*steps, *sized]}) == 6


def test_a_field_for_paths_changes_the_fingerprint() -> None:
    """The batch has one more field, so a resumed trainer would find another batch."""
    with_paths = FolderSource(path=Path("/data"), path_bytes=64)

    assert len({fingerprint_with(), fingerprint_with(source=with_paths)}) == 2


def test_the_keys_that_decide_bytes_change_the_fingerprint_and_no_others() -> None:
    """The mark on a key includes it in the fingerprint."""
    assert set(keys_marked(Mark.DECIDES_BYTES, StreamConfig)) == DECIDE_BYTES.keys() | {"weights", "mix", "erase"}
    assert len({fingerprint_with(**{key: value}) for key, value in DECIDE_BYTES.items()} | {fingerprint_with()}) == 7
    assert {fingerprint_with(**{key: value}) for key, value in DECIDE_TIME.items()} == {fingerprint_with()}
    assert fingerprint_with(lag="lockstep", max_skew=3) == fingerprint_with()
    assert fingerprint_with(cache="encoded", cache_memory=1 << 20) == fingerprint_with()
    assert fingerprint_with(cache="encoded", cache_dir=Path("/ssd"), cache_size=1 << 20) == fingerprint_with()


def test_a_cache_of_decoded_samples_changes_the_fingerprint() -> None:
    """Cached images are decoded whole, and a short side resizes them. The size has no effect."""
    decoded = {"cache": "decoded", "cache_memory": 1 << 20}
    steps = (op("decode"), op("random_resized_crop", size=(32, 32)))
    resized = (op("decode"), op("resize", shorter_side=64), op("random_resized_crop", size=(32, 32)))
    seen = [
        fingerprint_with(pipeline=steps),
        fingerprint_with(pipeline=steps, **decoded),
        fingerprint_with(pipeline=steps, **decoded, cache_short_side=64),
        fingerprint_with(pipeline=steps, **decoded, cache_short_side=65),
    ]

    assert len(set(seen)) == 4
    assert fingerprint_with(pipeline=resized, **decoded) == seen[2]
    assert fingerprint_with(pipeline=steps, cache="decoded", cache_dir=Path("/ssd"), cache_size=1 << 30) == seen[1]


def test_the_text_of_users_functions_counts() -> None:
    """A changed function gives other bytes; a pipeline without functions adds nothing."""
    config = StreamConfig(**BASE)
    seen = [
        fingerprint(content_of(plan_of(config, DIGESTS, modules), DIGEST))
        for modules in ({}, {"a": "1"}, {"a": "2"}, {"b": "1"})
    ]

    assert len(set(seen)) == 4
    assert seen[0] == fingerprint_with()


def test_the_source_counts_by_its_content_alone() -> None:
    """The same files at another path are the same stream; other files at the same path are not."""
    assert fingerprint_with(source=FolderSource(path=Path("/mnt/copy"))) == fingerprint_with()
    assert fingerprint_with(digest="5f" + DIGEST[2:]) != fingerprint_with()


def test_a_file_that_a_step_reads_counts_by_its_content_alone() -> None:
    """At another path it is the same stream; with other content it is another one."""
    moved = tuple(replace(step, file=Path("/moved")) if step.op == "tokenize" else step for step in STEPS)

    assert fingerprint_with(pipeline=moved, digests={**DIGESTS, Path("/moved"): "a" * 64}) == fingerprint_with()
    assert fingerprint_with(digests={**DIGESTS, Path("/a"): "e" * 64}) != fingerprint_with()


def test_the_notation_of_a_number_makes_no_difference(tmp_path) -> None:
    """1 equals 1.0, 2 equals 2.0, and defaults may be written out."""
    texts = ("probability = 1", "probability = 1.0", 'probability = 1.0, direction = "horizontal"')
    streams = [
        load(
            tmp_path,
            '[streams.a]\nsource = { type = "folder", path = "p" }\nbatch_size = 4\npipeline = [ { op = "decode" }, '
            f'{{ op = "random_resized_crop", size = [8, 8], ratio = [{low}, 2] }}, {{ op = "random_flip", {text} }} ]',
        ).streams["a"]
        for text in texts
        for low in ("1", "1.0")
    ]

    assert len({fingerprint(content_of(plan_of(stream), DIGEST)) for stream in streams}) == 1


def test_a_fingerprint_is_short_text() -> None:
    """Every saved state includes it."""
    assert len(fingerprint_with()) == FINGERPRINT_DIGITS
    int(fingerprint_with(), 16)


@pytest.mark.parametrize(("key", "table"), [("mix", Mix(mixup=0.8)), ("erase", Erasing(count=3))])
def test_what_trainers_do_counts_with_the_size_of_the_images(key, table) -> None:
    """Without it nothing is named: streams keep their fingerprints."""
    base = BASE | {"pipeline": (op("decode"), op("center_crop", size=(36, 24)))}
    without, whole = (content_of(plan_of(StreamConfig(**base | keys)), "x") for keys in ({}, {key: table}))
    assert key not in without
    assert whole[key].items() >= {"height": 36, "width": 24}.items()
    assert whole[key].items() >= ({"mixup": 0.8} if key == "mix" else {"count": 3}).items()


def test_weights_count_by_what_they_draw() -> None:
    """A file of the weights that a class has draws the same; without weights nothing is named."""
    config = StreamConfig(**BASE | {"pipeline": WITHOUT_PACK, "weights": Weights(file=Path("/w.npy"))})
    plain = content_of(plan_of(StreamConfig(**BASE | {"pipeline": WITHOUT_PACK})), DIGEST)
    draws = [EvenDraws(bounds_of(np.asarray(weights), 4), 0) for weights in ([1.0, 3.0], [3.0, 9.0], [1.0, 4.0])]
    found = [
        content_of(plan_of(config), DIGEST, Plan(4, 4, 0, shuffle=True, drop_last=False, draws=one)) for one in draws
    ]

    assert found[0] == found[1] != found[2]
    assert "weights" not in plain


def test_an_option_of_a_chosen_step_at_its_default_is_in_no_fingerprint() -> None:
    """A step that is chosen from is named as one that stands alone."""
    one, other = (
        fingerprint_with(
            pipeline=(op("decode"), op("choose", of=(op("rotate", degrees=(0, 9), probability=chance), op("invert"))))
        )
        for chance in (1.0, 0.5)
    )
    named = named_by_content(op("choose", of=(op("gray"),)), {})["of"]

    assert one != other
    assert named == [{"op": "gray", "field": "image", "channels": 3}]
