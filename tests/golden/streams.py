"""The golden streams: every kind of source, every step, and all other options that decide bytes."""

from pathlib import Path
from typing import Any

DECODE = {"op": "decode"}
SMALL = {"op": "resize", "size": [24, 32]}
MEMORY = "96MiB"
"""Of a daemon that serves all of them: each needs a part of its own."""
STILL = [DECODE, SMALL]
"""Steps with the same result in each epoch."""


def golden_streams(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every stream by name, over the data that ``write_data`` wrote into ``folder``."""
    return {
        name: {"batch_size": 7, **stream}
        for name, stream in {**_sources(folder), **_pipelines(folder), **_orders(folder)}.items()
    }


def _images(folder: Path) -> dict[str, Any]:
    return {"type": "folder", "path": str(folder / "images")}


def _annotated(folder: Path) -> dict[str, Any]:
    return {
        "type": "webdataset",
        "root": str(folder / "shards"),
        "shards": ["a-{0..1}.tar"],
        "fields": {
            "image": "image",
            "mask": "image",
            "boxes": "float32[?,4]",
            "points": "float32[?,2]",
            "id": "int64",
        },
        "names": {"mask": "seg.png", "boxes": "json:boxes", "points": "json:points", "id": "json:id"},
    }


def _objects(folder: Path) -> dict[str, Any]:
    return {
        "type": "webdataset",
        "root": str(folder / "shards"),
        "shards": ["objects.tar"],
        "fields": {
            "image": "image",
            "ids": "image",
            "masks": "uint8[?,?,?]",
            "boxes": "float32[?,4]",
            "classes": "int64[?]",
            "keypoints": "float32[?,?,3]",
        },
        "names": {
            "ids": "ids.png",
            "masks": "masks.npy",
            **{name: f"json:{name}" for name in ("boxes", "classes", "keypoints")},
        },
    }


def _texts(folder: Path) -> dict[str, Any]:
    return {"type": "csv", "path": str(folder / "table.csv"), "fields": {"text": "text"}}


def _padded(*fields: str) -> list[dict[str, Any]]:
    return [
        {"op": "pad_batch", "field": name, "max_shape": [2, 4] if name == "boxes" else [2], "fill": -1}
        for name in fields
    ]


def _sources(folder: Path) -> dict[str, dict[str, Any]]:
    images, arrays = _images(folder), {"type": "npz", "path": str(folder / "both.npz")}
    return {
        "folder": {"source": {**images, "path_bytes": 24}, "pipeline": STILL},
        "list": {
            "source": {"type": "list", "path": str(folder / "list.txt"), "root": str(folder / "images")},
            "pipeline": STILL,
        },
        "glob": {
            "source": {
                "type": "glob",
                "root": str(folder / "images"),
                "patterns": ["{cat,owl}/*"],
                "classes": "folder",
            },
            "pipeline": STILL,
        },
        "webdataset": {
            "source": {"type": "webdataset", "root": str(folder / "shards"), "shards": ["a-*.tar"], "image": ["jpg"]},
            "pipeline": STILL,
        },
        "csv": {
            "source": {
                "type": "csv",
                "path": str(folder / "table.csv"),
                "image": "file",
                "fields": {"label": "int64", "age": "float32", "box": "int32[3]"},
                "names": {"label": "Class Label"},
            },
            "pipeline": STILL,
        },
        "chats": {
            "source": {
                "type": "jsonl",
                "root": str(folder),
                "shards": ["chats.jsonl"],
                "fields": {"captions": "text[<=3]", "messages": "json"},
            },
            "pipeline": [
                {"op": "pick", "field": "captions"},
                {"op": "text_bytes", "field": "captions", "length": 24},
                {
                    "op": "chat",
                    "tokenizer": str(folder / "chat_tokenizer.json"),
                    "template": "mistral",
                    "max_length": 64,
                },
                {"op": "pad_batch", "field": "tokens", "max_shape": [64]},
                {"op": "pad_batch", "field": "loss_mask", "max_shape": [64]},
            ],
        },
        "interleaved": {
            "source": {
                "type": "jsonl",
                "root": str(folder),
                "shards": ["shown.jsonl"],
                "image_root": str(folder / "images"),
                "fields": {"messages": "json", "files": "image[<=3]"},
            },
            "pipeline": [
                {
                    "op": "chat",
                    "tokenizer": str(folder / "chat_tokenizer.json"),
                    "template": "chatml",
                    "max_length": 64,
                    "image": "<bos>",
                },
                {"op": "decode", "field": "files"},
                {"op": "resize", "field": "files", "max_pixels": 1200, "min_pixels": 300, "multiple_of": 8},
                {
                    "op": "interleave",
                    "images": "files",
                    "image_token": 13,
                    "size": 4,
                    "merge": 2,
                    "also": ["loss_mask"],
                },
                {
                    "op": "pack",
                    "field": "tokens",
                    "length": 192,
                    "documents": 4,
                    "window": 8,
                    "too_long": "drop",
                    "patches": 256,
                },
            ],
        },
        "lists": {
            "source": {
                "type": "jsonl",
                "root": str(folder),
                "shards": ["lines-*.jsonl"],
                "image_root": str(folder / "images"),
                "fields": {"files": "image[<=3]", "one": "image[<=3]", "texts": "text[<=3]"},
                "names": {"one": "files", "texts": "files"},
            },
            "pipeline": [
                {"op": "decode", "field": "files"},
                {"op": "random_resized_crop", "field": "files", "size": [20, 24]},
                {"op": "random_flip", "field": "files"},
                {"op": "ragged", "field": "files", "max_shape": [3, 20, 24, 3]},
                {"op": "pick", "field": "one"},
                {"op": "decode", "field": "one"},
                {"op": "resize", "field": "one", "size": [16, 16]},
                {"op": "pick", "field": "texts", "which": "all"},
                {"op": "text_bytes", "field": "texts", "length": 16},
                {"op": "pad_batch", "field": "texts", "max_shape": [3, 16]},
            ],
        },
        "jsonl": {
            "source": {
                "type": "jsonl",
                "root": str(folder),
                "shards": ["lines-*.jsonl"],
                "image_root": str(folder / "images"),
                "fields": {
                    "image": "image",
                    "second": "image",
                    "images": "int64",
                    "text": "text",
                    "label": "int16",
                    "box": "int32[2]",
                },
                "names": {
                    "image": "files.0",
                    "second": "files.1",
                    "images": "files.#",
                    "label": "meta.label",
                    "box": "meta.box",
                },
                "defaults": {"second": "cat/000.jpg"},
            },
            "pipeline": [
                *STILL,
                {"op": "decode", "field": "second"},
                {"op": "resize", "field": "second", "size": [16, 16]},
                {"op": "text_bytes", "length": 32},
            ],
        },
        "coco": {
            "source": {
                "type": "coco",
                "path": str(folder / "objects" / "coco.json"),
                "images": str(folder / "objects" / "images"),
                "fields": ["image", "boxes", "classes", "masks", "keypoints", "ids"],
                "keypoints": 2,
            },
            "pipeline": [
                {"op": "decode"},
                {
                    "op": "follow",
                    "boxes": "boxes",
                    "masks": "masks",
                    "keypoints": "keypoints",
                    "labels": ["classes", "ids"],
                },
                {"op": "random_resized_crop", "size": [32, 40]},
                {"op": "pad_batch", "field": "masks", "max_shape": [2, 32, 40]},
                {"op": "pad_batch", "field": "keypoints", "max_shape": [2, 2, 3]},
                *_padded("boxes", "classes", "ids"),
            ],
        },
        "yolo": {
            "source": {"type": "yolo", "root": str(folder / "objects"), "images": "images/*.jpg"},
            "pipeline": [
                {"op": "decode"},
                {"op": "follow", "boxes": "boxes", "form": "cxcywh", "relative": True, "labels": ["classes"]},
                {"op": "resize", "size": [32, 32]},
                *_padded("boxes", "classes"),
            ],
        },
        "voc": {
            "source": {
                "type": "voc",
                "root": str(folder / "objects"),
                "images": "images/*.jpg",
                "annotations": "xml/*.xml",
                "names": ["cat", "dog", "owl"],
            },
            "pipeline": [*STILL, *_padded("boxes", "classes")],
        },
        "pairs": {
            "source": {
                "type": "pairs",
                "root": str(folder / "objects"),
                "fields": {"image": "image", "mask": "image"},
                "files": {"image": "images/*.jpg", "mask": "masks/*_ids.png"},
            },
            "pipeline": [{"op": "decode"}, {"op": "follow", "mask": "mask"}, {"op": "resize", "size": [16, 16]}],
        },
        "npy": {
            "source": {"type": "npy", "root": str(folder), "arrays": {"image": "x.npy", "label": "y.npy"}},
        },
        "npz": {"source": arrays},
        "raw": {
            "source": {
                "type": "raw",
                "path": str(folder / "records.bin"),
                "offset": 4,
                "record": {"label": "uint8", "image": "uint8[8,8,3]"},
            },
        },
        "token-windows": {
            "source": {
                "type": "tokens",
                "root": str(folder),
                "files": ["words-*.bin"],
                "dtype": "uint16",
                "length": 17,
                "overlap": 1,
            },
            "pipeline": [{"op": "cast", "field": "tokens", "dtype": "int32"}],
        },
        "documents": {
            "source": {
                "type": "tokens",
                "path": str(folder / "documents.bin"),
                "format": "megatron",
                "dtype": "int32",
            },
            "pipeline": [{"op": "pad_batch", "field": "tokens", "max_shape": [8], "fill": -1}],
        },
        "tfrecord": {
            "source": {
                "type": "tfrecord",
                "root": str(folder),
                "shards": ["examples.tfrecord"],
                "fields": {"image": "image", "label": "int64", "ids": "int64[?]"},
                "names": {"image": "image/encoded"},
            },
            "pipeline": [*STILL, {"op": "pad_batch", "field": "ids", "max_shape": [6], "fill": -1}],
        },
        "sequences": {
            "source": {
                "type": "tfrecord",
                "root": str(folder),
                "shards": ["sequences.tfrecord"],
                "sequence": True,
                "fields": {"label": "int64", "steps": "int64[?]"},
            },
            "pipeline": [{"op": "ragged", "field": "steps", "max_shape": [4]}],
        },
        "arrow": {
            "source": {
                "type": "parquet",
                "root": str(folder),
                "shards": ["rows-*.arrow"],
                "fields": {"image": "image", "label": "int64", "values": "float32[?]"},
                "names": {"label": "class"},
            },
            "pipeline": [*STILL, {"op": "ragged", "field": "values", "max_shape": [4]}],
        },
        "parquet": {
            "source": {
                "type": "parquet",
                "root": str(folder),
                "shards": ["rows-*.parquet"],
                "fields": {"image": "image", "label": "int64", "values": "float32[?]"},
                "names": {"label": "class"},
            },
            "pipeline": [*STILL, {"op": "ragged", "field": "values", "max_shape": [4]}],
        },
        "lmdb-keys": {
            "source": {
                "type": "lmdb",
                "path": str(folder / "keys.lmdb"),
                "fields": {"image": "image", "label": "int64"},
                "key": "{field}-*",
                "format": "text",
            },
            "pipeline": STILL,
        },
        "lmdb-maps": {
            "source": {
                "type": "lmdb",
                "path": str(folder / "maps.lmdb"),
                "fields": {"image": "image", "label": "int64", "name": "text"},
                "names": {"image": "img"},
                "format": "msgpack",
            },
            "pipeline": [*STILL, {"op": "text_bytes", "field": "name", "length": 16}],
        },
        "sound": {
            "source": {"type": "glob", "root": str(folder / "sounds"), "patterns": ["*.*"], "media": "audio"},
            "pipeline": [{"op": "decode_audio", "rate": 8000, "seconds": 0.1, "formats": ["flac", "wav"]}],
        },
        "whole-sounds": {
            "source": {"type": "folder", "path": str(folder / "sounds"), "media": "audio"},
            "pipeline": [
                {"op": "decode_audio", "rate": 6000, "channels": 2, "dtype": "int16", "formats": ["flac", "wav"]},
                {"op": "pad_batch", "field": "audio", "max_shape": [3000, 2]},
            ],
        },
        "video": {
            "source": {
                "type": "video",
                "root": str(folder / "videos"),
                "files": ["*.avi"],
                "every": 3,
                "path_bytes": 8,
            },
            "pipeline": [{"op": "random_resized_crop", "size": [24, 24]}],
        },
        "lerobot": {
            "source": {
                "type": "lerobot",
                "root": str(folder / "robot"),
                "cameras": ["top", "wrist"],
                "fields": ["observation.state", "action", "task_index"],
                "times": {"top": [-0.2, 0.0], "observation.state": [-0.1, 0.0], "action": [0.0, 0.1, 0.2]},
                "normalize": {"observation.state": "mean_std"},
                "codecs": ["ffv1"],
            },
            "pipeline": [
                {"op": "random_resized_crop", "field": "top", "size": [24, 24]},
                {"op": "color_jitter", "field": "wrist", "brightness": 0.4},
            ],
        },
        "decode_video": {
            "source": {
                "type": "csv",
                "path": str(folder / "kinetics.csv"),
                "delimiter": " ",
                "header": False,
                "fields": {"video": "video", "label": "int64"},
            },
            "pipeline": [
                {"op": "decode_video", "frames": 3, "fps": 8.0, "clips": 2, "codecs": ["ffv1"], "times": "seconds"},
                {"op": "random_resized_crop", "size": [24, 24]},
                {"op": "random_flip"},
                {"op": "color_jitter", "brightness": 0.4},
            ],
        },
        "picture-and-sound": {
            "source": {"type": "csv", "path": str(folder / "heard.csv"), "fields": {"video": "video"}},
            "pipeline": [
                {
                    "op": "decode_video",
                    "frames": 4,
                    "fps": 10.0,
                    "clips": 2,
                    "codecs": ["ffv1"],
                    "audio": "sound",
                    "audio_rate": 4000,
                    "audio_channels": 2,
                },
                {"op": "random_resized_crop", "size": [24, 24]},
            ],
        },
        "clips": {
            "source": {
                "type": "video",
                "root": str(folder / "videos"),
                "files": ["*.avi"],
                "frames": 4,
                "stride": 2,
                "every": 5,
                "size": [24, 32],
                "interpolation": "area",
                "color": "gray",
            },
        },
        "concat": {
            "source": {"type": "concat", "sources": [images, images], "source_field": "origin"},
            "pipeline": STILL,
        },
        "mix": {
            "source": {
                "type": "mix",
                "sources": [images, {"type": "subset", "of": images, "stop": 5}],
                "weights": [3, 1],
                "source_field": "origin",
            },
            "pipeline": STILL,
        },
        "mix-that-changes": {
            "source": {
                "type": "mix",
                "sources": [images, {"type": "subset", "of": images, "stop": 5}],
                "weights": {"0": [1, 0], "2": [3, 1], "epoch 1": [0, 1]},
                "source_field": "origin",
            },
            "pipeline": STILL,
        },
        "mix-at-a-temperature": {
            "source": {
                "type": "mix",
                "sources": [images, {"type": "subset", "of": images, "stop": 5}],
                "temperature": 2,
            },
            "pipeline": STILL,
        },
        "subset": {
            "source": {"type": "subset", "of": arrays, "start": "25%", "stop": "90%", "shuffle_seed": 3},
        },
        "chosen": {
            "source": {"type": "subset", "of": arrays, "indices": str(folder / "chosen.npy")},
            "batch_size": 3,
        },
        "python": {
            "source": {
                "type": "python",
                "function": "golden_code:Squares",
                "fields": {"image": "uint8[4,4,3]", "label": "int64"},
                "options": {"count": 30},
            },
        },
    }


def _pipelines(folder: Path) -> dict[str, dict[str, Any]]:
    image = {
        "color": [{**DECODE, "color": "bgr"}, SMALL],
        "gray-decode": [{**DECODE, "color": "gray", "exif": "ignore", "scale": "off"}, SMALL],
        "cubic": [DECODE, {**SMALL, "interpolation": "cubic"}],
        "letterbox": [
            DECODE,
            {"op": "resize", "longer_side": 60, "multiple_of": 8, "interpolation": "lanczos"},
            {"op": "letterbox", "size": [40, 40]},
        ],
        "nearest": [DECODE, {**SMALL, "interpolation": "nearest"}],
        "area": [DECODE, {**SMALL, "interpolation": "area"}],
        "enlarge": [DECODE, {"op": "resize", "size": [130, 150], "interpolation": "linear"}],
        "evaluate": [DECODE, {"op": "resize", "shorter_side": 28}, {"op": "center_crop", "size": [24, 24]}],
        "random-crop": [DECODE, {"op": "random_crop", "size": [40, 40], "padding": 4, "fill": [1, 2, 3]}],
        "train": [
            DECODE,
            {"op": "random_resized_crop", "size": [24, 24]},
            {"op": "random_flip"},
            {"op": "normalize"},
            {"op": "layout"},
        ],
        "half": [DECODE, SMALL, {"op": "random_flip", "direction": "both"}, {"op": "normalize", "dtype": "float16"}],
        "pad": [DECODE, {"op": "pad", "size": [120, 120], "place": "top_left", "fill": [9]}],
        "border": [DECODE, SMALL, {"op": "pad", "border": [1, 2, 3, 4]}],
        "quarter-turns": [DECODE, {"op": "resize", "size": [24, 24]}, {"op": "rotate", "quarter_turns": [0, 1, 2, 3]}],
        "degrees": [DECODE, SMALL, {"op": "rotate", "degrees": [-30, 30], "fill": [128]}],
        "degrees-nearest": [DECODE, SMALL, {"op": "rotate", "degrees": [-30, 30], "interpolation": "nearest"}],
        "jitter": [
            DECODE,
            SMALL,
            {"op": "color_jitter", "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
        ],
        "gray": [DECODE, SMALL, {"op": "gray", "channels": 1}],
        "cutout": [DECODE, SMALL, {"op": "cutout", "holes": 2, "size": [6, 8], "fill": [5]}],
        "perhaps": [
            DECODE,
            SMALL,
            {"op": "random_crop", "size": [24, 32], "padding": 6, "probability": 0.5},
            {"op": "rotate", "degrees": [-30, 30], "probability": 0.5},
            {"op": "color_jitter", "brightness": 0.4, "hue": 0.1, "probability": 0.8},
            {"op": "gray", "probability": 0.3},
            {"op": "cutout", "size": [6, 8], "probability": 0.5},
        ],
        "levels": [
            DECODE,
            SMALL,
            {"op": "solarize", "probability": 0.3},
            {"op": "posterize", "bits": 6, "probability": 0.5},
            {"op": "equalize", "probability": 0.5},
            {"op": "autocontrast"},
            {"op": "invert", "probability": 0.5},
            {"op": "sharpen", "factor": [0.1, 3]},
            {"op": "blur", "sigma": [0.1, 2], "probability": 0.7},
            {"op": "erase", "fill": "noise", "probability": 0.5},
            {"op": "erase"},
        ],
        "views": [
            DECODE,
            {
                "op": "views",
                "into": {
                    "image": {
                        "count": 2,
                        "steps": [
                            {"op": "random_resized_crop", "size": [24, 32], "scale": [0.4, 1]},
                            {"op": "random_flip"},
                            {"op": "color_jitter", "brightness": 0.4, "hue": 0.1, "probability": 0.8},
                            {"op": "blur", "sigma": [0.1, 2], "probability": 0.5},
                        ],
                    },
                    "local": {
                        "count": 3,
                        "steps": [{"op": "random_resized_crop", "size": [9, 9], "scale": [0.05, 0.4]}],
                    },
                    "floats": {"steps": [{"op": "center_crop", "size": [12, 12]}, {"op": "normalize"}]},
                },
            },
        ],
        "caffe": [{**DECODE, "color": "bgr"}, SMALL, {"op": "subtract_mean", "scale": 0.017}, {"op": "layout"}],
        "to": [DECODE, SMALL, {"op": "to"}],
        "fields": [
            *STILL,
            {"op": "rename", "field": "label", "to": "y"},
            {"op": "one_hot", "field": "y", "classes": 3},
        ],
        "call": [
            *STILL,
            {"op": "call", "function": "golden_code:noise", "outputs": {"image": "uint8[24,32,3]", "score": "float32"}},
        ],
        "padded": [DECODE, {"op": "pad_batch", "max_shape": [100, 100, 3], "fill": 7}],
        "patches": [
            DECODE,
            {"op": "patches", "size": 8},
            {"op": "pack", "field": "image", "length": 300, "too_long": "drop", "ids": False},
        ],
        "ragged": [DECODE, {"op": "ragged", "max_shape": [64, 90, 3], "too_large": "crop"}],
    }
    text = {
        "tokens": [{"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9}],
        "ragged-tokens": [
            {"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9, "padding": "none"},
            {"op": "ragged", "field": "tokens", "max_shape": [9]},
        ],
        "packed-tokens": [
            {"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9, "padding": "none"},
            {"op": "pack", "field": "tokens", "length": 20, "documents": 3, "fill": -1},
        ],
        "split-tokens": [
            {"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9, "padding": "none"},
            {"op": "pack", "field": "tokens", "length": 4, "window": 8},
        ],
        "cut-tokens": [
            {"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9, "padding": "none"},
            {"op": "pack", "field": "tokens", "length": 7, "documents": 7, "method": "concat-split"},
        ],
        "words": [
            {"op": "lowercase"},
            {"op": "remove_stopwords", "file": str(folder / "stopwords.txt")},
            {"op": "lookup", "words": str(folder / "words.txt"), "table": str(folder / "table.npy"), "max_words": 5},
        ],
        "bytes": [{"op": "text_bytes", "length": 24}],
    }
    numbers = [
        {"op": "clip", "min": -50, "max": 400},
        {"op": "scale", "factor": 0.125, "offset": 1},
        {"op": "cast", "field": "weight", "dtype": "float16", "truncate": True},
        {"op": "drop", "fields": ["image"]},
    ]
    follow = {"op": "follow", "mask": "mask", "boxes": "boxes", "points": "points", "mask_fill": 255}
    followed = [
        DECODE,
        follow,
        {"op": "random_resized_crop", "size": [32, 32]},
        {"op": "random_flip"},
        {"op": "rotate", "degrees": [-20, 20]},
        {"op": "pad_batch", "field": "boxes", "max_shape": [2, 4]},
        {"op": "pad_batch", "field": "points", "max_shape": [1, 2]},
    ]
    objects = [
        DECODE,
        {
            "op": "follow",
            "boxes": "boxes",
            "labels": ["classes"],
            "masks": "masks",
            "keypoints": "keypoints",
            "mask": "ids",
            "mask_type": "int32",
            "mask_fill": 70_000,
            "form": "cxcywh",
            "relative": True,
            "annotated": "stored",
            "flip_indices": [1, 0, 2],
            "min_area": 4,
        },
        {"op": "random_resized_crop", "size": [32, 32]},
        {"op": "random_flip", "direction": "both"},
        {"op": "rotate", "degrees": [-20, 20]},
        {"op": "box_form", "form": "cxcywh", "relative": True},
        {"op": "pad_batch", "field": "boxes", "max_shape": [2, 4]},
        {"op": "pad_batch", "field": "classes", "max_shape": [2], "fill": -1},
        {"op": "pad_batch", "field": "masks", "max_shape": [2, 32, 32]},
        {"op": "pad_batch", "field": "keypoints", "max_shape": [2, 3, 3]},
    ]
    ids = [
        {"op": "drop", "fields": ["boxes", "points"]},
        DECODE,
        {"op": "follow", "mask": "mask", "mask_fill": 255},
        {"op": "random_crop", "size": [24, 32], "padding": 4},
        {"op": "map_ids", "field": "mask", "file": str(folder / "ids.npy"), "ignore": 254},
        {"op": "map_ids", "field": "id", "table": {"0": 7, "1": -3}, "ignore": -1},
    ]
    warped = [
        DECODE,
        follow,
        {"op": "letterbox", "size": [32, 32]},
        {"op": "affine", "degrees": [-20, 20], "shear_y": [-9, 9]},
        {"op": "perspective"},
        {"op": "elastic", "interpolation": "nearest", "probability": 0.5},
        *followed[-2:],
    ]
    policies = [
        DECODE,
        follow,
        {"op": "resize", "size": [24, 32]},
        {"op": "rand_augment"},
        {"op": "trivial_augment", "probability": 0.5},
        {"op": "auto_augment", "policy": "cifar10"},
        {"op": "augmix", "probability": 0.5},
        {
            "op": "choose",
            "of": [{"op": "blur"}, {"op": "random_crop", "size": [24, 32], "padding": 4}, {"op": "random_flip"}],
            "weights": [1, 2, 0.5],
        },
        *followed[-2:],
    ]
    sound = {
        "log-mel": [{"op": "log_mel", "field": "audio", "rate": 8000, "bands": 40, "scale": "slaney", "norm": True}],
        "spectrogram": [{"op": "spectrogram", "n_fft": 120, "window_length": 90, "hop": 45, "log": "db", "top": 60}],
        "mfcc": [{"op": "mfcc", "n_fft": 256, "bands": 20, "coefficients": 13, "preemphasis": 0.97, "edges": "cut"}],
    }
    sound["augmented-sound"] = [
        {"op": "normalize_loudness", "of": "peak", "level_db": -3},
        {"op": "gain", "probability": 0.5},
        {"op": "speed", "probability": 0.5},
        *sound["log-mel"],
        {"op": "spec_augment", "field": "audio", "time_width": 3, "frequency_width": 9, "probability": 0.75},
        {"op": "pad_batch", "field": "audio", "max_shape": [7, 40], "fill": -20},
    ]
    sound["mixed-sound"] = [
        {"op": "trim", "top_db": 9, "frame": 40, "hop": 20},
        {"op": "room", "root": str(folder / "noise"), "rate": 8000, "probability": 0.75},
        {"op": "add_noise", "root": str(folder / "noise"), "patterns": ["[1-4].*"], "rate": 8000, "snr_db": [-5, 15]},
        {"op": "pad_batch", "field": "audio", "max_shape": [1600]},
    ]
    sounds = {"type": "npy", "root": str(folder), "arrays": {"audio": "sounds.npy"}}
    joined = [
        *objects[:2],
        {"op": "resize", "longer_side": 32},
        {"op": "mosaic", "size": [32, 32], "probability": 0.8, "until_epoch": 2},
        {"op": "affine", "scale": [0.5, 1.5], "translate": [0.05, 0.05], "fill": [114], "size": [32, 32]},
        {"op": "random_flip"},
        {"op": "pad_batch", "field": "boxes", "max_shape": [8, 4]},
        {"op": "pad_batch", "field": "classes", "max_shape": [8], "fill": -1},
        {"op": "pad_batch", "field": "masks", "max_shape": [8, 32, 32]},
        {"op": "pad_batch", "field": "keypoints", "max_shape": [8, 3, 3]},
    ]
    pasted = [
        *objects[:2],
        {"op": "letterbox", "size": [32, 32]},
        {"op": "copy_paste", "fraction": 1.0, "max_overlap": 0.9},
        {"op": "copy_paste", "paste": "mirrored", "probability": 0.5},
        {"op": "random_flip"},
        {"op": "mixup", "probability": 0.8},
        *({**step, "max_shape": [32, *step["max_shape"][1:]]} for step in joined[-4:]),
    ]
    near = [{**step, "near": 3} if step["op"] == "mosaic" else step for step in joined]
    return {
        **{name: {"source": _images(folder), "pipeline": steps} for name, steps in image.items()},
        **{name: {"source": sounds, "pipeline": steps} for name, steps in sound.items()},
        **{name: {"source": _texts(folder), "pipeline": steps} for name, steps in text.items()},
        "numbers": {"source": {"type": "npz", "path": str(folder / "both.npz")}, "pipeline": numbers},
        "followed": {"source": _annotated(folder), "pipeline": followed},
        "objects": {"source": _objects(folder), "pipeline": objects},
        "joined": {"source": _objects(folder), "pipeline": joined},
        "joined-near": {"source": _objects(folder), "pipeline": near, "batch_size": 2},
        "pasted": {"source": _objects(folder), "pipeline": pasted},
        "ids": {"source": _annotated(folder), "pipeline": ids},
        "policies": {"source": _annotated(folder), "pipeline": policies},
        "followed-warps": {"source": _annotated(folder), "pipeline": warped},
    }


def _orders(folder: Path) -> dict[str, dict[str, Any]]:
    """Return streams for the options that decide a batch's samples and its substitutes."""
    images = {"source": _images(folder), "pipeline": STILL}
    tokenize = {"op": "tokenize", "file": str(folder / "tokenizer.json"), "max_length": 9, "padding": "none"}
    crop = {"op": "random_resized_crop", "size": [24, 24]}
    small = {"source": {**images["source"]}, "pipeline": [{**DECODE, "max_pixels": 6500}, SMALL], "max_bad_fraction": 1}
    return {
        "in-order": {**images, "shuffle": False},
        "another-seed": {**images, "seed": 12345678901},
        "blocks": {
            "source": {"type": "webdataset", "root": str(folder / "shards"), "shards": ["a-*.tar"], "image": ["jpg"]},
            "pipeline": STILL,
            "shuffle": {"blocks": 2, "block_samples": 2},
        },
        "weighted": {**images, "weights": {"by": "class", "power": 0.25}},
        "weighted-blocks": {
            "source": {"type": "webdataset", "root": str(folder / "shards"), "shards": ["a-*.tar"], "image": ["jpg"]},
            "pipeline": STILL,
            "shuffle": {"blocks": 2, "block_samples": 2},
            "weights": {"by": "class"},
        },
        "drawn-once": {**images, "weights": {"by": "class", "replacement": False, "samples": 7}},
        "buckets": {**images, "batch_size": 2, "balance": 2, "bucket": {"field": "image", "by": "aspect", "count": 3}},
        "bucket-crops": {
            "source": _annotated(folder),
            "batch_size": 2,
            "pipeline": [
                DECODE,
                {"op": "follow", "mask": "mask", "boxes": "boxes", "points": "points"},
                {"op": "crop_to_bucket", "sizes": [[32, 24], [28, 28], [24, 32]], "random": True},
                {"op": "random_flip"},
                {"op": "to", "layout": "nchw"},
                {"op": "pad_batch", "field": "boxes", "max_shape": [2, 4]},
                {"op": "pad_batch", "field": "points", "max_shape": [1, 2]},
            ],
        },
        "drawn-sizes": {
            "source": _annotated(folder),
            "batch_size": 2,
            "repeats": 2,
            "balance": 2,
            "pipeline": [
                DECODE,
                {"op": "follow", "mask": "mask", "boxes": "boxes", "points": "points"},
                {"op": "random_flip"},
                {"op": "letterbox", "sizes": [[32, 24], [28, 28], [24, 32], [40, 40]]},
                {"op": "to", "layout": "nchw"},
                {"op": "pad_batch", "field": "boxes", "max_shape": [2, 4]},
                {"op": "pad_batch", "field": "points", "max_shape": [1, 2]},
            ],
        },
        "drawn-sides": {
            **images,
            "batch_size": 2,
            "pipeline": [
                DECODE,
                {"op": "resize", "shorter_sides": [20, 24, 28], "max_longer_side": 44, "multiple_of": 4},
                {"op": "pad_batch", "max_shape": [44, 44, 3]},
            ],
        },
        "buckets-of-lengths": {
            "source": _texts(folder),
            "batch_size": 2,
            "bucket": {"field": "tokens", "bounds": [3, 5]},
            "pipeline": [tokenize, {"op": "pad_batch", "field": "tokens", "max_shape": [9]}],
        },
        "budgets": {
            "source": _texts(folder),
            "batch_size": 4,
            "bucket": {"field": "tokens", "bounds": [3, 5], "budget": 10},
            "pipeline": [tokenize, {"op": "pad_batch", "field": "tokens", "max_shape": [9]}],
        },
        "balanced-rows": {
            "source": _texts(folder),
            "batch_size": 1,
            "balance": 2,
            "pipeline": [tokenize, {"op": "pack", "field": "tokens", "length": 9, "window": 8}],
        },
        **{
            f"packed-mix-that-changes-{method}": {
                "source": {
                    "type": "mix",
                    "sources": [_texts(folder), {"type": "subset", "of": _texts(folder), "start": 3, "stop": 11}],
                    "weights": {"0": [1, 0], "2": [3, 1], "epoch 1": [1, 2]},
                    "source_field": "origin",
                },
                "batch_size": 2,
                "pipeline": [
                    tokenize,
                    {"op": "pack", "field": "tokens", "length": 9, "documents": 9, "method": method},
                ],
            }
            for method in ("best-fit", "concat-split")
        },
        "whole-batches": {**images, "drop_last": True},
        "repeated": {**small, "pipeline": [{**DECODE, "max_pixels": 6500}, crop], "repeats": 3},
        "repeated-views": {
            "source": _images(folder),
            "pipeline": [DECODE, {"op": "views", "into": {"image": {"count": 2, "steps": [crop]}}}],
            "repeats": 2,
        },
        "mixed-and-erased": {
            **images,
            "mix": {"mixup": 0.8, "cutmix": 1.0, "by": "row"},
            "erase": {"fill": "color", "count": 2},
        },
        "mixed-batches": {
            **images,
            "mix": {"mixup": 0.4, "cutmix": 2.0},
            "erase": {"probability": 0.5, "fill": "noise"},
        },
        "substituted": small,
        "masked": {**small, "on_error": "mask"},
        "verified": {**images, "verify": True},
        "cached": {**images, "cache": "encoded", "cache_memory": "1MiB"},
        "cached-crops": {
            "source": _images(folder),
            "pipeline": [DECODE, crop],
            "cache": "encoded",
            "cache_memory": "1MiB",
        },
        "cached-pixels": {
            "source": _images(folder),
            "pipeline": [DECODE, crop],
            "cache": "decoded",
            "cache_memory": "4MiB",
            "cache_short_side": 40,
        },
    }
