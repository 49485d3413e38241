"""Drawn scenes with figures, and files that say where these are. For ``draw_pictures``.

    /srv/coco/...          images and JSON of COCO: boxes, outlines, keypoints, panoptic segments
    /srv/scenes/a.tar      the same with masks of classes, as Cityscapes numbers them
    /srv/bucket/photos     with a table of their kinds

Everything follows from the number of a scene.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SCENES, HEIGHT, WIDTH = 16, 360, 480
KINDS = ("red", "blue", "green")
COLOURS = {"red": (196, 70, 58), "blue": (58, 104, 190), "green": (66, 140, 82)}
SKY, GROUND = ((196, 220, 240), (246, 214, 180), (214, 206, 236)), ((150, 170, 110), (190, 166, 130), (120, 130, 140))
POINTS = (
    *((0, -0.9), (0.03, -0.94), (-0.03, -0.94), (0.07, -0.91), (-0.07, -0.91)),
    *((0.16, -0.72), (-0.16, -0.72), (0.26, -0.52), (-0.26, -0.52), (0.3, -0.32), (-0.3, -0.32)),
    *((0.1, -0.4), (-0.1, -0.4), (0.13, -0.2), (-0.13, -0.2), (0.15, 0.0), (-0.15, 0.0)),
)
"""COCO's 17 points of a figure that is 1 high and stands at the origin."""
LIMBS = ((5, 7), (7, 9), (6, 8), (8, 10), (11, 13), (13, 15), (12, 14), (14, 16))
PERSON, TREE, SKY_ID = 1, 184, 187


class Figure(NamedTuple):
    """Where a figure stands. ``points``: [17, 2]; ``outline``: corners."""

    kind: str
    points: Any
    outline: Any


def write_scenes(root: Path) -> None:
    """Write all files."""
    folders = [
        root / name for name in ("coco/train2017", "coco/annotations/panoptic_train2017", "scenes", "bucket/photos")
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    panoptic: list[dict[str, Any]] = []
    table = ["file,species"]
    with tarfile.open(root / "scenes" / "a.tar", "w") as scenes:
        for number in range(SCENES):
            name = f"{number:02}"
            picture, classes, segments, figures = _scene(number)
            file, mask = _encoded(picture, "JPEG"), _encoded(Image.fromarray(classes), "PNG")
            (root / "coco/train2017" / f"{name}.jpg").write_bytes(file)
            (root / "bucket/photos" / f"{name}.jpg").write_bytes(file)
            colours = np.stack([segments & 255, segments >> 8 & 255, segments >> 16], axis=2).astype(np.uint8)
            (folders[1] / f"{name}.png").write_bytes(_encoded(Image.fromarray(colours), "PNG"))
            images.append({"id": number, "file_name": f"{name}.jpg", "height": HEIGHT, "width": WIDTH})
            infos = [{"id": one, "category_id": kind, "iscrowd": 0} for one, kind in ((5_000, SKY_ID), (70_000, TREE))]
            for place, figure in enumerate(figures):
                low, high = figure.outline.min(axis=0), figure.outline.max(axis=0)
                keypoints = np.concatenate([figure.points, np.full((17, 1), 2)], axis=1).round(1).reshape(-1).tolist()
                box = {"bbox": [*low.tolist(), *(high - low).tolist()], "category_id": PERSON, "iscrowd": 0, "area": 1}
                one = {"id": len(objects), "image_id": number, "segmentation": [figure.outline.reshape(-1).tolist()]}
                objects.append({**one, **box, "keypoints": keypoints})
                infos.append({"id": 1_000_000 * (place + 1), "category_id": PERSON, "iscrowd": 0})
            panoptic.append({"image_id": number, "file_name": f"{name}.png", "segments_info": infos})
            table.append(f"{name}.jpg,{figures[0].kind}")
            _add(scenes, f"{name}.jpg", file)
            _add(scenes, f"{name}.seg.png", mask)
    (root / "bucket/photos/train.csv").write_text("\n".join(table) + "\n")
    annotations = root / "coco/annotations"
    categories = [{"id": PERSON, "name": "person"}, {"id": TREE, "name": "tree"}, {"id": SKY_ID, "name": "sky"}]
    for kind, found in {"instances": objects, "person_keypoints": objects, "panoptic": panoptic}.items():
        content = {"images": images, "annotations": found, "categories": categories}
        (annotations / f"{kind}_train2017.json").write_text(json.dumps(content))


def _scene(number: int) -> tuple[Image.Image, Any, Any, list[Figure]]:
    """A picture, its classes uint8, its segments int64, and the figures in it."""
    random = np.random.default_rng(number)
    horizon = int(random.integers(140, 220))
    picture = Image.new("RGB", (WIDTH, HEIGHT), SKY[number % 3])
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, horizon, WIDTH, HEIGHT), fill=GROUND[int(random.integers(3))])
    classes, segments = np.full((HEIGHT, WIDTH), 23, np.uint8), np.full((HEIGHT, WIDTH), 5_000)
    classes[horizon:], segments[horizon:] = 7, 70_000
    figures = []
    for place in range(int(random.integers(2, 5))):
        height, kind = random.uniform(110, 200), KINDS[int(random.integers(3))]
        foot = np.array([random.uniform(60, WIDTH - 60), random.uniform(horizon + 60, HEIGHT - 10)])
        points = np.array(POINTS) * height + foot + random.normal(0, height / 60, (17, 2))
        mask = Image.new("1", (WIDTH, HEIGHT))
        for on, ink in ((draw, COLOURS[kind]), (ImageDraw.Draw(mask), 1)):
            _draw_figure(on, points, height, ink)
        inside = np.asarray(mask)
        classes[inside], segments[inside] = 24, 1_000_000 * (place + 1)
        figures.append(Figure(kind, points, _outline(inside)))
    return picture, classes, segments, figures


def _draw_figure(draw: ImageDraw.ImageDraw, points: Any, height: float, ink: Any) -> None:
    width = max(3, int(height / 12))
    for first, second in LIMBS:
        draw.line([*map(tuple, points[[first, second]])], fill=ink, width=width)
        draw.ellipse(_around(points[second], width / 2), fill=ink)
    draw.polygon([tuple(points[place]) for place in (5, 6, 12, 11)], fill=ink)
    draw.ellipse(_around(points[0], height * 0.1), fill=ink)


def _around(middle: Any, radius: float) -> tuple[float, float, float, float]:
    return middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius


def _outline(inside: Any) -> Any:
    """The left and the right end of each fourth line of pixels, around: [corners, 2]."""
    lines = np.flatnonzero(inside.any(axis=1))[::4]
    left = [(float(inside[line].argmax()), float(line)) for line in lines]
    right = [(float(WIDTH - inside[line, ::-1].argmax()), float(line)) for line in lines]
    return np.array([*left, *right[::-1]])


def _encoded(picture: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
