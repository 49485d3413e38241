"""One checksum of the output on generated inputs, for every step that computes numbers.

A program, so that it runs in processes of every kind: ``python -m support.pixel_sums INPUTS``
writes them as JSON. ``write_inputs`` makes INPUTS once for all runs, because an encoder itself
may depend on the processor.
"""

import json
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from batchd.data.pipeline.augment.options import PolicyStep
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.options import STEP_KINDS, StepOptions
from batchd.data.pipeline.views.options import View
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Value
from support.steps import op

WITHOUT_NUMBERS = frozenset(
    (
        "drop",
        "rename",
        "pad_batch",
        "ragged",
        "pack",
        "patches",
        "tokenize",
        "chat",
        "pick",
        "interleave",
        "lowercase",
        "remove_stopwords",
        "lookup",
        "text_bytes",
        "call",
    )
)
"""The output of these steps is moved, looked up or computed by user code."""
CHANNELS_MAX = 4
"""With so many, an image has no colours for a policy."""
SAMPLES = 3
RECOLORED_SAMPLES = 24
"""Rounding hides most differences in the last bit, so it takes many values to find one."""
COLORS = ("rgb", "bgr", "gray")
METHODS = ("auto", "nearest", "linear", "area", "cubic", "lanczos")
SIZES = ((97, 131), (120, 158), (300, 420), (40, 400), (300, 5), (1, 1))
PICTURES = ("noise", "photo")
WARPS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "affine": (
        "affine",
        {"degrees": (-90, 90), "translate": (0.2, 0.1), "scale": (0.5, 2), "shear_x": (-40, 40), "shear_y": (-9, 9)},
    ),
    "perspective": ("perspective", {}),
    "elastic": ("elastic", {"alpha": 60}),
}
GEOMETRY: Mapping[str, Sequence[StepOptions]] = {
    **{
        f"resize {method} to {size}": [op("resize", size=size, interpolation=method)]
        for method in METHODS
        for size in SIZES
    },
    "resize shorter_side": [op("resize", shorter_side=100), op("center_crop", size=(90, 90))],
    **{
        f"random_resized_crop {method}": [op("random_resized_crop", size=(112, 96), interpolation=method)]
        for method in METHODS
    },
    "center_crop": [op("center_crop", size=(150, 380))],
    "crop_to_bucket": [
        op("crop_to_bucket", sizes=((99, 120), (99, 140)), random=True),
        op("center_crop", size=(90, 120)),
    ],
    "random_crop": [op("random_crop", size=(99, 120), padding=30, fill=(1, 2, 3))],
    "random_flip": [op("random_flip", direction="both")],
    "pad": [op("pad", border=(1, 2, 3, 4), fill=(9, 8, 7))],
    "rotate quarter_turns": [op("rotate", quarter_turns=(0, 1, 2, 3)), op("center_crop", size=(99, 99))],
    "rotate linear": [op("rotate", degrees=(-180, 180), fill=(10, 200, 99))],
    "rotate nearest": [op("rotate", degrees=(-180, 180), interpolation="nearest", fill=(10, 200, 99))],
    "rotate by a little": [op("rotate", degrees=(-1, 1))],
    "resize longer_side": [op("resize", longer_side=90, multiple_of=7), op("letterbox", size=(99, 98), fill=(9,))],
    "affine scaled": [op("affine", scale=(0.4, 2.5), translate=(0.3, 0.3), fill=(10,))],
    "rand_augment": [op("rand_augment", count=4, operation_probability=1)],
    "auto_augment": [op("auto_augment"), op("auto_augment", policy="svhn", interpolation="nearest")],
    "trivial_augment": [op("trivial_augment"), op("trivial_augment")],
    "choose": [op("choose", of=(op("rotate", degrees=(-9, 9)), op("random_flip"), op("elastic")), weights=(1, 1, 2))],
    **{
        f"{name} {method}": [op(kind, **given, interpolation=method, fill=(10,))]
        for method in ("linear", "nearest")
        for name, (kind, given) in WARPS.items()
    },
}
"""Steps that need other steps after them."""
PIXELS: Mapping[str, Sequence[StepOptions]] = {
    "brightness": [op("color_jitter", brightness=0.4)],
    "contrast": [op("color_jitter", contrast=0.4)],
    "saturation": [op("color_jitter", saturation=0.4)],
    "saturation beyond": [op("color_jitter", saturation=9)],
    "hue": [op("color_jitter", hue=0.5)],
    "color_jitter": [op("color_jitter", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)],
    "gray 1": [op("gray", channels=1)],
    "gray 3": [op("gray")],
    "cutout": [op("cutout", holes=3, size=(30, 40), fill=(1, 2, 3))],
    "solarize, posterize": [op("solarize", threshold=99), op("posterize", bits=5)],
    "equalize, invert": [op("equalize"), op("invert")],
    "autocontrast": [op("posterize", bits=6), op("autocontrast")],
    "sharpen": [op("sharpen", factor=(0, 10))],
    "blur": [op("blur", sigma=(0.1, 5))],
    "augmix": [op("augmix")],
    "erase": [op("erase", fill="noise", count=2), op("erase")],
    **{f"normalize {dtype}": [op("normalize", dtype=dtype), op("layout")] for dtype in ("float32", "float16")},
    "subtract_mean": [op("subtract_mean", scale=0.017)],
    **{
        f"to {dtype} {order}": [op("to", dtype=dtype, layout=order)]
        for dtype in ("uint8", "float16")
        for order in ("nhwc", "nchw")
    },
}
VIEWS = op(
    "views",
    into={
        "image": View(
            count=2, steps=(op("random_resized_crop", size=(64, 64), scale=(0.4, 1)), op("color_jitter", hue=0.5))
        ),
        "local": View(count=4, steps=(op("random_resized_crop", size=(24, 24), scale=(0.05, 0.4)), op("normalize"))),
    },
)
NUMBERS: Mapping[str, Sequence[StepOptions]] = {
    "cast": [op("cast", field="numbers", dtype="float16", truncate=True)],
    "clip": [op("clip", field="numbers", min=-1.5, max=900.25)],
    "scale": [op("scale", field="numbers", factor=0.1234567, offset=-3.21)],
    "spectrogram": [op("spectrogram", field="numbers", n_fft=450, window="hamming", edges="zeros", power=1)],
    "spectrogram of odd length": [op("spectrogram", field="numbers", n_fft=147, preemphasis=0.97, log="db", top=80)],
    "log_mel": [op("log_mel", field="numbers", scale="slaney", norm=True)],
    "log_mel of Kaldi": [
        op("log_mel", field="numbers", n_fft=512, window_length=400, window="povey", remove_mean=True, scale="kaldi")
    ],
    "mfcc": [op("mfcc", field="numbers")],
    "gain, normalize_loudness": [op("normalize_loudness", field="numbers"), op("gain", field="numbers")],
    "speed": [op("speed", field="numbers"), op("pad_batch", field="numbers", max_shape=(5000,))],
    "trim": [
        op("trim", field="numbers", top_db=0.1, frame=40, hop=20),
        op("pad_batch", field="numbers", max_shape=(4096,)),
    ],
    "spec_augment": [op("spectrogram", field="numbers"), op("spec_augment", field="numbers")],
    "one_hot": [op("one_hot", field="label", classes=10)],
    "map_ids": [op("map_ids", field="label", table={"7": 3})],
}


def write_inputs(path: Path) -> None:
    """Write the inputs of all steps, as an .npz file."""
    from support import images, sounds  # noqa: PLC0415  what encodes is the business of one process
    from support.videos import write_video  # noqa: PLC0415  as well

    random = np.random.default_rng(3)
    noise = random.integers(0, 256, (241, 317, 3), np.uint8)
    photo = images.photo(360, 480, seed=5)
    files = {
        **{f"jpeg {kind}": images.jpeg(photo, subsampling=kind) for kind in ("420", "422", "440", "444", "411")},
        "jpeg of noise": images.jpeg(noise),
        "jpeg gray": images.jpeg(photo[..., 1]),
        "jpeg progressive": images.progressive_jpeg(photo),
        "jpeg restarts": images.jpeg_of(photo, restart=2),
        "jpeg inks": images.ycck_jpeg(np.concatenate([photo, photo[..., :1]], axis=2)),
        "jpeg on its side": images.jpeg_with_exif(images.jpeg(photo), 6),
        "png": images.encode(noise, ".png"),
        "png gray": images.encode(noise[..., 0], ".png"),
        "png alpha": images.encode(np.concatenate([noise, noise[..., :1]], axis=2), ".png"),
        "png 16": images.png16(noise),
        "png palette": images.palette_png(noise[..., 0] % 16, random.integers(0, 256, (16, 3)), range(16)),
        "webp": images.encode(photo, ".webp"),
        "webp lossless": images.encode(noise, ".webp"),
        "bmp": images.encode(noise, ".bmp"),
        "gif": images.animation(".gif", [photo, photo[::-1].copy()]),
    }
    arrays = {
        "noise": noise,
        "photo": photo,
        "mask": random.integers(0, 256, noise.shape[:2], np.uint8),
        "boxes": np.sort(random.uniform(0, 241, (9, 2, 2)), axis=1).reshape(9, 4).astype(np.float32),
        "points": random.uniform(0, 241, (9, 2)).astype(np.float32),
        "numbers": random.normal(0, 500, 4096).astype(np.float32),
    }
    with tempfile.TemporaryDirectory() as folder:
        arrays["video"] = np.fromfile(write_video(Path(folder) / "a.mkv", 30, sound="pcm_s16le"), np.uint8)
    wave = random.uniform(-1, 1, (4096, 2))
    for kind in ("FLAC", "WAV"):
        arrays[f"sound {kind}"] = np.frombuffer(sounds.stored(kind, "PCM_24", wave, 11_025), np.uint8)
    np.savez(path, **arrays, **{f"file {name}": np.frombuffer(data, np.uint8) for name, data in files.items()})


def sums_of(inputs: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the checksum of what each step makes of the inputs."""
    made: dict[str, str] = {}
    for name, columns, steps, values in chain.from_iterable(
        cases(inputs) for cases in (_decodings, _moved, _followed, _joined, _heard, _others)
    ):
        made[name] = _sum(columns, steps, values, SAMPLES)
    for name, columns, steps, values in _recolored(inputs):
        made[name] = _sum(columns, steps, values, RECOLORED_SAMPLES)
    return made


def ops_covered() -> set[str]:
    """Return the names of the steps that are run."""
    groups = [*GEOMETRY.values(), *PIXELS.values(), *NUMBERS.values()]
    others = {
        "decode",
        "decode_video",
        "decode_audio",
        "add_noise",
        "room",
        "follow",
        "box_form",
        "views",
        "mosaic",
        "mixup",
        "copy_paste",
    }
    return {step.op for steps in groups for step in steps} | others


_Case = tuple[str, list[Column], Sequence[StepOptions], dict[str, Value]]


def _decodings(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    for key in (key for key in inputs if key.startswith("file ")):
        values = {"image": memoryview(inputs[key].tobytes())}
        columns = [Column("image", "encoded")]
        name = f"decode {key.removeprefix('file ')}"
        whole = op("center_crop", size=(360, 480))
        for color in COLORS:
            yield f"{name} {color}", columns, [op("decode", color=color), whole], values
        if "jpeg" in key:
            for factor in (2, 4, 8):
                small = op("resize", size=(360 // factor, 480 // factor))
                yield f"{name} at 1/{factor}", columns, [op("decode"), small], values
            yield f"{name} crop", columns, [op("decode"), op("random_resized_crop", size=(64, 64))], values
        yield f"{name} views", columns, [op("decode"), VIEWS], values


def _moved(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    for picture in PICTURES:
        colored = inputs[picture]
        layers = {1: colored[..., :1], 3: colored, 4: np.concatenate([colored, colored[..., 1:2]], axis=2)}
        for name, steps in GEOMETRY.items():
            for channels, pixels in layers.items():
                fits = all(len(getattr(step, "fill", (0,))) in (1, channels) for step in steps)
                if fits and (channels != CHANNELS_MAX or not any(isinstance(step, PolicyStep) for step in steps)):
                    columns = [Column("image", shape=pixels.shape)]
                    yield f"{name} of {picture}, {channels}", columns, steps, {"image": pixels}


def _recolored(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    columns = [Column("image", shape=inputs["noise"].shape)]
    for name, steps in PIXELS.items():
        yield name, columns, steps, {"image": inputs["noise"]}


def _followed(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    values = {"image": inputs["noise"], "mask": inputs["mask"], "boxes": inputs["boxes"], "points": inputs["points"]}
    values |= {
        "masks": np.stack([(inputs["mask"] % (9 + number) == 0).astype(np.uint8) for number in range(9)]),
        "ids": inputs["mask"].astype(np.int32) * 65_537,
        "keypoints": np.dstack(
            [np.repeat(inputs["points"][:, np.newaxis], 2, axis=1), np.full((9, 2, 1), 2, np.float32)]
        ),
    }
    columns = [
        Column("image", shape=inputs["noise"].shape),
        Column("mask", shape=inputs["mask"].shape),
        Column("boxes", dtype="float32", shape=(9, 4)),
        Column("points", dtype="float32", shape=(9, 2)),
    ]
    follow = op("follow", mask="mask", mask_fill=255, boxes="boxes", points="points")
    of_objects = [
        *columns[:1],
        columns[2],
        Column("masks", shape=(9, *inputs["mask"].shape)),
        Column("keypoints", dtype="float32", shape=(9, 2, 3)),
        Column("ids", dtype="int32", shape=inputs["mask"].shape),
    ]
    objects = op(
        "follow",
        boxes="boxes",
        masks="masks",
        keypoints="keypoints",
        flip_indices=(1, 0),
        mask="ids",
        mask_type="int32",
        keep_empty=True,
    )
    relative = op("box_form", form="cxcywh", relative=True)
    for name, steps in GEOMETRY.items():
        yield f"followers of {name}", columns, [follow, *steps], values
        yield f"objects of {name}", of_objects, [objects, *steps, relative], values


def _joined(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    """Samples that the same one joins."""
    values = {"image": inputs["photo"], "boxes": inputs["boxes"], "mask": np.ascontiguousarray(inputs["photo"][..., 0])}
    columns = [
        Column("image", shape=inputs["photo"].shape),
        Column("boxes", dtype="float32", shape=(9, 4)),
        Column("mask", shape=values["mask"].shape),
    ]
    move = op("affine", degrees=(-9, 9), scale=(0.5, 1.5), size=(200, 240))
    room = op("pad_batch", field="boxes", max_shape=(36, 4))
    follow = op("follow", boxes="boxes", mask="mask")
    yield "mosaic", columns, [follow, op("mosaic", size=(300, 400)), move, room], values
    turned = [follow, op("random_flip"), op("affine", degrees=(-9, 9)), op("mixup"), room]
    yield "mixup", columns, turned, values
    masks = np.stack([values["mask"] // 30 == number for number in range(9)]).astype(np.uint8)
    rooms = [
        op("pad_batch", field="boxes", max_shape=(36, 4)),
        op("pad_batch", field="masks", max_shape=(36, *masks.shape[1:])),
    ]
    paste = [op("follow", boxes="boxes", masks="masks"), op("copy_paste", paste="mirrored", max_overlap=1.0), *rooms]
    columns = [*columns[:2], Column("masks", shape=masks.shape)]
    yield "copy_paste", columns, paste, {"image": values["image"], "boxes": values["boxes"], "masks": masks}


def _heard(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    for key in (key for key in inputs if key.startswith("sound ")):
        for rate in (8_000, 11_025, 16_000):
            step = op("decode_audio", rate=rate, seconds=0.2, formats=("flac", "wav"))
            yield f"{key} at {rate}", [Column("audio", "audio")], [step], {"audio": memoryview(inputs[key].tobytes())}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.flac").write_bytes(inputs["sound FLAC"].tobytes())
        columns, values = [Column("audio", dtype="float32", shape=(4096,))], {"audio": inputs["numbers"]}
        for step in (
            op("add_noise", root=Path(folder)),
            op("room", root=Path(folder)),
            op("room", root=Path(folder), normalize="energy"),
        ):
            yield f"{step.op} {getattr(step, 'normalize', '')}", columns, [step], values


class _Same:
    """Gives the sample itself."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def others_of(self, _epoch: int, _whose: int, _pick: int, _near: int | None) -> Iterator[int]:
        yield 0

    def read_other(self, _epoch: int, _sample: int) -> Mapping[str, Value]:
        return self._values

    def other_is_bad(self, _sample: int, error: SampleUndecodable | SampleUnreadable) -> None:
        raise error

    def values_stay(self) -> bool:
        return False

    def others_end(self) -> None:
        pass

    def shown_name(self, _sample: int) -> str:
        return ""


def _others(inputs: Mapping[str, np.ndarray]) -> Iterator[_Case]:
    heard = {"audio": "sound", "audio_rate": 11_025, "audio_quality": "fast"}
    clips = op("decode_video", frames=3, fps=8.0, clips=2, times="seconds", **heard), op("resize", size=(41, 53))
    yield "decode_video", [Column("video", "video")], clips, {"video": memoryview(inputs["video"].tobytes())}
    values = {"numbers": inputs["numbers"], "label": np.int64(7)}
    columns = [Column("numbers", dtype="float32", shape=inputs["numbers"].shape), Column("label", dtype="int64")]
    for name, steps in NUMBERS.items():
        yield name, columns, steps, values


def _sum(columns: list[Column], steps: Sequence[StepOptions], values: dict[str, Value], samples: int) -> str:
    pipeline = Pipeline(columns, steps, seed=1, others=_Same(values))
    row = {name: np.zeros(column.fixed_shape, column.dtype) for name, column in pipeline.columns.items()}
    seen = 0
    for sample in range(samples):
        pipeline.run(values, 0, sample, 0, row)
        for name in sorted(row):
            seen = zlib.crc32(row[name].tobytes(), seen)
    return f"{seen:08x}"


if __name__ == "__main__":
    with np.load(sys.argv[1]) as stored:
        given = {name: stored[name] for name in stored.files}
    assert ops_covered() | WITHOUT_NUMBERS == STEP_KINDS.keys(), "a step has no checksum"
    sys.stdout.write(json.dumps(sums_of(given)))
