"""Data for the golden streams, the same on every machine: small files of every kind of source.

Integer arithmetic makes the pixels; lossless encoders or, for JPEG, libjpeg's integer DCT write
them. So the versions of the libraries that wrote the files do not change the digest of a stream.
"""

import json
from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any

import msgpack
import numpy as np
import soundfile
from numpy.typing import NDArray

from support.images import encode, jpeg, jpeg_with_exif
from support.lerobot_files import FPS, Layout, write_lerobot
from support.lmdb_files import write_lmdb
from support.megatron import write_megatron
from support.parquet_files import class_labels, hugging_face, write_arrow, write_parquet
from support.shards import write_shard
from support.texts import save, word_level, word_table
from support.tfrecords import example, sequence_example, write_records
from support.videos import Coding, write_video

SAMPLES = 24
CLASSES = ("cat", "dog", "owl")
TEXTS = ("The cat sat on the mat.", "the (mat) sat, ON the cat", "", "Straße: naïve cats; the dog", "cat cat mat")
CODE = """
import numpy as np

def noise(sample, rng):
    return {"image": sample["image"] // 2 + rng.integers(0, 9, sample["image"].shape, np.uint8), "score": float(rng.random())}

class Squares:
    def __init__(self, count):
        self._count = count
    def __len__(self):
        return self._count
    def __getitem__(self, number):
        return np.full((4, 4, 3), number * number % 256, np.uint8), number
"""


def image(number: int, height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """Make a picture, uint8 [height, width, 3]: integer slopes and stripes, no two alike."""
    y, x = np.mgrid[:height, :width]
    channels = [(x * (2 + number % 3) + y + 11 * number), (x * y // 7 + 40 * (x // 8 % 2)), (255 - 3 * y + 5 * number)]
    return (np.stack(channels, -1) % 256).astype(np.uint8)


def mask(number: int, height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """Make class numbers, uint8 [height, width]."""
    y, x = np.mgrid[:height, :width]
    return ((x // 9 + y // 7 + number) % 5).astype(np.uint8)


def files(number: int) -> bytes:
    """Return an image as a file; formats, sizes, orientations and colours take turns."""
    made = image(number, 48 + number % 5 * 8, 64 + number % 3 * 16)
    match number % 6:
        case 0 | 1:
            return jpeg(made, 90, "420" if number % 2 else "444")
        case 2:
            return encode(made, ".png")
        case 3:
            return encode(made, ".bmp")
        case 4:
            return jpeg(np.ascontiguousarray(made[..., 0]))
        case _:
            return jpeg_with_exif(jpeg(made), number % 8 + 1)


def write_data(folder: Path) -> None:
    """Write everything that the streams of ``golden.streams`` read."""
    folder.mkdir()
    _write_images(folder)
    _write_arrays(folder)
    _write_tables(folder)
    _write_records(folder)
    _write_objects(folder / "objects")
    for number in range(2):
        write_video(
            folder / "videos" / f"{number}.avi", 30, Coding("ffv1", pixels="bgr0", b_frames=0), first=30 * number
        )
    lossless = Coding("ffv1", units=FPS, pixels="bgr0", b_frames=0, muxer={"fflags": "+bitexact"})
    write_lerobot(folder / "robot", Layout((14, 9, 12), coding=lossless, ending="mkv"))
    for name in ("0.mkv", "1.avi"):
        write_video(
            folder / "heard" / name, 50, Coding("ffv1", pixels="bgr0", b_frames=0), 50 * int(name[0]), "pcm_s16le"
        )
    (folder / "heard.csv").write_text("video\n" + "heard/0.mkv\nheard/1.avi\n" * 5)
    (folder / "kinetics.csv").write_text("".join(f"videos/{n % 2}.avi {n}\n" for n in range(14)))
    for number in range(SAMPLES):
        tone = np.arange(900 + 37 * number) * (number % 11 + 3) % 4001 * 8 - 16_000
        path = folder / "sounds" / f"{number:03}.{'wav' if number % 2 else 'flac'}"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, np.stack([tone, -tone // 3], 1).astype(np.int16), (8_000, 11_025)[number % 3 > 0])
    (folder / "noise").mkdir()
    for number in range(5):
        noise = np.arange(300 + 700 * number) ** 2 * (2 * number + 3) % 4001 * 8 - 16_000
        soundfile.write(folder / "noise" / f"{number}.flac", noise.astype(np.int16), (8_000, 16_000)[number % 2])
    (folder / "golden_code.py").write_text(CODE)
    save(word_level(), folder)
    word_table(folder, ["the", "cat", "mat", "straße"])
    (folder / "stopwords.txt").write_text("the\non # of place\n")
    np.save(folder / "ids.npy", np.array([4, 3, 2]))
    np.save(folder / "chosen.npy", np.array([5, 3, 3, 20, 11, 0, 7, 23]))


def _write_images(folder: Path) -> None:
    lines = []
    for number in range(SAMPLES):
        path = folder / "images" / CLASSES[number % 3] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files(number))
        lines.append(f"{path.relative_to(folder / 'images')} {number % 7}\n")
    (folder / "list.txt").write_text("".join(lines))
    boxes = [[[1.5, 2, 30, 40 + number % 9], [50, 10, 79, 59]] for number in range(SAMPLES)]
    members = [
        (f"{number:03}.{ending}", data)
        for number in range(SAMPLES)
        for ending, data in (
            ("jpg", jpeg(image(number))),
            ("seg.png", encode(mask(number), ".png")),
            ("json", json.dumps({"boxes": boxes[number], "points": [[number, 7.5]], "id": number}).encode()),
            ("cls", str(number % 4).encode()),
            ("txt", TEXTS[number % len(TEXTS)].encode()),
        )
    ]
    write_shard(folder / "shards" / "a-0.tar", members[: 5 * 10])
    write_shard(folder / "shards" / "a-1.tar", members[5 * 10 :])
    objects = [
        (f"{number:03}.{ending}", data)
        for number in range(SAMPLES)
        for ending, data in (
            ("jpg", jpeg_with_exif(jpeg(image(number)), number % 8 + 1)),
            ("ids.png", encode(mask(number).astype(np.uint16) * 300, ".png")),
            ("masks.npy", _npy(np.stack([mask(number) == level for level in (1, 2)]).astype(np.uint8))),
            ("json", json.dumps(_objects(number)).encode()),
        )
    ]
    write_shard(folder / "shards" / "objects.tar", objects)


def _npy(array: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def _objects(number: int) -> dict[str, object]:
    """Boxes and keypoints of an image, as fractions of the picture as it is stored."""
    keypoints = [[[0.1, 0.2, 2], [0.6, 0.01 * number, 1], [0, 0, 0]], [[0.9, 0.9, 2], [0.5, 0.5, 2], [0.7, 0.8, 1]]]
    return {
        "boxes": [[0.3, 0.4, 0.5, 0.1 + 0.01 * number], [0.8, 0.8, 0.3, 0.3]],
        "classes": [3, number],
        "keypoints": keypoints,
    }


def _write_objects(folder: Path) -> None:
    """Images of 80 x 60 pixels; for each a mask, and in each form the same two objects or none."""
    for name in ("images", "masks", "labels", "xml"):
        (folder / name).mkdir(parents=True)
    coco: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": [], "categories": [{"id": 9}, {"id": 4}]}
    for number in range(SAMPLES):
        boxes = [(4 + number, 10, 20, 25), (40, 6, 30 - number, 50)] if number % 5 else []
        (folder / "images" / f"{number:03}.jpg").write_bytes(jpeg(image(number)))
        (folder / "masks" / f"{number:03}_ids.png").write_bytes(encode(mask(number), ".png"))
        lines, xml = [], []
        coco["images"].append({"id": number, "file_name": f"{number:03}.jpg", "height": 60, "width": 80})
        for place, (x, y, width, height) in enumerate(boxes):
            lines.append(f"{place} {(x + width / 2) / 80} {(y + height / 2) / 60} {width / 80} {height / 60}\n")
            ends = {"xmin": x + 1, "ymin": y + 1, "xmax": x + width, "ymax": y + height}
            box = "".join(f"<{end}>{value}</{end}>" for end, value in ends.items())
            xml.append(f"<object><name>{CLASSES[place]}</name><bndbox>{box}</bndbox></object>")
            corners = [x, y, x + width, y + 2.25, x + width / 3, y + height]
            points = {"keypoints": [x + 1, y + 1, 2, x + width / 2, y, 1], "segmentation": [corners]}
            record = {"image_id": number, "category_id": 9 - 5 * place, "bbox": [x, y, width, height], **points}
            coco["annotations"].append({"id": 2 * number + place, **record})
        (folder / "labels" / f"{number:03}.txt").write_text("".join(lines))
        (folder / "xml" / f"{number:03}.xml").write_text(f"<annotation>{''.join(xml)}</annotation>")
    (folder / "coco.json").write_text(json.dumps(coco))


def _write_arrays(folder: Path) -> None:
    pictures = np.stack([image(number, 16, 20) for number in range(SAMPLES)])
    numbers = np.arange(SAMPLES, dtype=np.int64) * 37 - 100
    np.save(folder / "x.npy", pictures)
    np.save(folder / "y.npy", numbers)
    np.savez(
        folder / "both.npz", image=pictures, label=numbers.astype(np.int16), weight=(numbers / 8).astype(np.float32)
    )
    np.save(folder / "sounds.npy", np.stack([_sound(number) for number in range(SAMPLES)]))
    records = b"".join(pack("<B", number % 10) + image(number, 8, 8).tobytes() for number in range(SAMPLES))
    (folder / "records.bin").write_bytes(b"head" + records)


def _sound(number: int) -> NDArray[np.int16]:
    """Whole numbers that look like a tone and noise."""
    places = np.arange(900, dtype=np.int64)
    tone, noise = places * (number + 5) % 199, places * places * 7919 % 211
    return ((tone - 99) * 120 + (noise - 105) * 9).astype(np.int16)


def _write_tables(folder: Path) -> None:
    rows = [
        f'{n},{n / 4},"{TEXTS[n % len(TEXTS)]}",{n} {-n} 3,images/{CLASSES[n % 3]}/{n:03}.jpg\n' for n in range(SAMPLES)
    ]
    (folder / "table.csv").write_text("Class Label,age,text,box,file\n" + "".join(rows))
    answers = ["yes", "", "No </s> tokens in here", "straße 漢字"]
    chats = [
        {
            "captions": TEXTS[: 1 + n % 3],
            "messages": [
                {"role": "system", "content": "Short."},
                *(
                    {"role": role, "content": answers[n % 4]}
                    for _ in range(1 + n % 3)
                    for role in ("user", "assistant")
                ),
            ],
        }
        for n in range(SAMPLES)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    shown = [
        {
            "messages": [
                {"role": "user", "content": [*[{"type": "image"}] * (n % 3), {"type": "text", "text": answers[n % 4]}]},
                {"role": "assistant", "content": answers[(n + 1) % 4]},
            ],
            "files": [f"{CLASSES[other % 3]}/{other % SAMPLES:03}.jpg" for other in range(n, n + n % 3)],
        }
        for n in range(SAMPLES)
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in shown))
    tokenizer = json.loads(Path(__file__).with_name("chats.json").read_text())["tokenizer"]
    (folder / "chat_tokenizer.json").write_text(json.dumps(tokenizer))
    lines = [
        {
            "text": TEXTS[n % len(TEXTS)],
            "meta": {"label": n, "box": [n, -n]},
            "files": [f"{CLASSES[other % 3]}/{other:03}.jpg" for other in range(n, min(n + n % 3, SAMPLES - 1) + 1)],
        }
        for n in range(SAMPLES)
    ]
    for part in range(2):
        some = lines[part * SAMPLES // 2 :][: SAMPLES // 2]
        (folder / f"lines-{part}.jsonl").write_text("".join(f"{json.dumps(line)}\n\n" for line in some))
    for part in range(2):
        numbers = range(part * SAMPLES // 2, (part + 1) * SAMPLES // 2)
        columns = {
            "image": hugging_face(files(number) for number in numbers),
            "class": [number % 3 for number in numbers],
            "caption": [TEXTS[number % len(TEXTS)] for number in numbers],
            "values": [[number / 2] * (number % 4) for number in numbers],
        }
        write_parquet(
            folder / f"rows-{part}.parquet", columns, class_labels(**{"class": list(CLASSES)}), row_group_size=5
        )
        write_arrow(folder / f"rows-{part}.arrow", columns, class_labels(**{"class": list(CLASSES)}), rows=5)

    words = np.arange(500) * 7919 % 50257
    for part in range(2):
        (folder / f"words-{part}.bin").write_bytes(words[part * 200 : 200 + part * 300].astype("<u2").tobytes())
    documents = [[words[n * 9 : n * 9 + n % 7].tolist(), [n]] for n in range(SAMPLES)]
    write_megatron(folder / "documents.bin", documents, "int32")


def _write_records(folder: Path) -> None:
    write_records(
        folder / "examples.tfrecord",
        [
            example(image__encoded=files(n), label=[n % 5], ids=list(range(n % 6)), text=TEXTS[n % 5].encode())
            for n in range(SAMPLES)
        ],
    )
    write_records(
        folder / "sequences.tfrecord",
        [
            sequence_example({"label": [n]}, {"steps": [[n * 3 + step] for step in range(1 + n % 4)]})
            for n in range(SAMPLES)
        ],
    )
    write_lmdb(
        folder / "keys.lmdb", {f"{field}-{n:04}".encode(): data for n in range(SAMPLES) for field, data in _fields(n)}
    )
    packed = {
        f"{n:04}".encode(): msgpack.packb({"img": files(n), "label": n, "name": TEXTS[n % 5]}) for n in range(SAMPLES)
    }
    write_lmdb(folder / "maps.lmdb", packed)


def _fields(number: int) -> list[tuple[str, Any]]:
    return [("image", files(number)), ("label", str(number % 9).encode())]
