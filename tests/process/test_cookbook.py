"""One daemon serves all configurations of docs/cookbook.md; the program of docs/my-code.md runs."""

import io
import json
import os
import re
import tomllib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from batchd.config.load import read_config
from support.images import encode, jpeg, photo
from support.lerobot_files import Layout, write_lerobot
from support.parquet_files import write_parquet
from support.shards import photo_shards, write_shard
from support.sounds import stored, sweep
from support.texts import save, word_level
from support.videos import with_sound, write_video

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "cookbook.md").read_text()
CAMERAS = ("top", "wrist", "left", "right")
RECIPES = re.findall(r"^## (.+?)\n(?:.*?)^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
MIXED = {"image": (224, 224, 3), "label": (), "mix_row": (), "mix_lambda": (), "mix_box": (4,)}
FIELDS = {
    "auto-cifar": {"image": (32, 32, 3)},
    "timm": MIXED | {"erase_box": (1, 4), "erase_key": ()},
    "deit-3": MIXED,
    "simclr": {"image": (2, 224, 224, 3), "label": ()},
    "dino": {"global_1": (224, 224, 3), "global_2": (224, 224, 3), "local": (8, 96, 96, 3), "label": ()},
    "diffusion": {"image": (448, 576, 3), "label": ()},
    "segmentation": {"image": (512, 512, 3), "mask": (512, 512)},
    "yolo": {"boxes": (2, 4), "classes": (2,)},
    "detr": {"boxes": (2, 4), "classes": (2,), "image_shape": (2,)},
    "mosaic": {"image": (640, 640, 3), "boxes": (4, 4), "classes": (4,)},
    "instances": {"image": (640, 640, 3), "boxes": (2, 4), "classes": (2,), "masks": (2, 640, 640)},
    "panoptic": {"image": (640, 640, 3), "segments": (640, 640), "ids": (1,), "classes": (1,)},
    "poses": {"image": (640, 640, 3), "boxes": (2, 4), "keypoints": (2, 17, 3)},
    "clip": {"image": (224, 224, 3), "tokens": (77,)},
    "captions": {"image": (224, 224, 3), "tokens": (77,)},
    "sft": {"tokens": (4096,), "loss_mask": (4096,), "position_ids": (4096,)},
    "llava": {"tokens": (4096,), "images": (16384, 588), "images_positions": (16384, 2), "images_segments": (16384,)},
    "pairs": {"chosen": (23,), "chosen_mask": (23,), "rejected": (23,), "rejected_mask": (23,)},
    "lines": {"tokens": (5,), "tokens_length": (), "id": ()},
    "segments": {"audio": (1001, 80), "audio_length": (), "label": ()},
    "recognition": {"tokens": (512,), "audio_length": ()},
    "keywords": {"audio": (101, 40), "audio_length": (), "label": ()},
    "keywords-val": {"audio": (101, 40), "audio_length": (), "label": ()},
    "robot": {"top": (2, 44, 60, 3), "right": (2, 48, 64, 3), "action": (4, 3), "action_is_pad": (4,)},
    "kinetics": {"image": (2, 16, 224, 224, 3), "label": ()},
    "kinetics-val": dict.fromkeys(("left", "middle", "right"), (10, 16, 224, 224, 3)) | {"label": ()},
    "vlm": {"image": (16, 336, 336, 3), "seconds": (16,), "tokens": (512,)},
    "seen-and-heard": {"image": (16, 224, 224, 3), "audio": (201, 80)},
    "own": {"image": (28, 28, 1), "label": ()},
    "camera": {"image": (48, 64, 3), "label": ()},
}
"""The shapes of a sample; streams that are missing here have those of photographs."""
PHOTOGRAPHS = {"image": (224, 224, 3), "label": ()}
SAMPLES = 12


def npy(array) -> bytes:
    """Return an array as `numpy.save` writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _panoptic(folder: Path, images: list[object]) -> None:
    """Write one segment for each image, which fills it: 65538 in the colours of COCO."""
    (folder / "panoptic_train2017").mkdir()
    annotations = []
    for number in range(SAMPLES):
        colours = np.full((240, 320, 3), (1, 0, 2), np.uint8)  # blue, green, red
        (folder / "panoptic_train2017" / f"{number}.png").write_bytes(encode(colours, ".png"))
        info = {"id": 65538, "category_id": 1, "iscrowd": 0}
        annotations.append({"image_id": number, "file_name": f"{number}.png", "segments_info": [info]})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "panoptic_train2017.json").write_text(json.dumps(content))


def write_llava(root: Path) -> None:
    """Lines of LLaVA's data, and their image."""
    (root / "llava" / "images").mkdir(parents=True, exist_ok=True)
    (root / "llava" / "images" / "3.jpg").write_bytes(jpeg(photo(240, 320)))
    shown = [{"from": "human", "value": "<image>\n..."}, {"from": "gpt", "value": "x"}]
    line = json.dumps({"image": "3.jpg", "conversations": shown}) + "\n"
    (root / "llava" / "train-0.jsonl").write_text(line * SAMPLES)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Make data for every recipe, under the names that the page has."""
    root = tmp_path_factory.mktemp("data")
    images = [jpeg(photo(240, 320, seed=number)) for number in range(SAMPLES)]
    mask = encode(np.arange(240 * 320, dtype=np.uint8).reshape(240, 320) % 3, ".png")
    for number, image in enumerate(images):
        file = root / "imagenet" / "train" / f"n{number % 3}" / f"{number:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
    (root / "imagenet" / "val").symlink_to(root / "imagenet" / "train")
    photo_shards(root / "imagenet" / "train", root / "bucket" / "imagenet")
    np.savez(root / "cifar10.npz", x_train=np.zeros((SAMPLES, 32, 32, 3), np.uint8), y_train=np.arange(SAMPLES))
    scenes, pairs = [], []
    objects: dict[str, list[object]] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (root / "coco" / "train2017").mkdir(parents=True)
    (root / "coco" / "annotations").mkdir()
    for number, image in enumerate(images):
        scenes += [(f"{number}.jpg", image), (f"{number}.seg.png", mask)]
        (root / "coco" / "train2017" / f"{number}.jpg").write_bytes(image)
        objects["images"].append({"id": number, "file_name": f"{number}.jpg", "height": 240, "width": 320})
        outline = {"segmentation": [[100, 80, 220, 80, 220, 160, 100, 160]], "keypoints": [160, 120, 2] * 17}
        box = {"image_id": number, "category_id": 1, "bbox": [100, 80, 120, 80], **outline}
        objects["annotations"] += [{"id": 2 * number + place, **box} for place in range(2)]
        pairs += [(f"{number}.jpg", image), (f"{number}.txt", b"the red cat")]
    for kind in ("instances", "person_keypoints"):
        (root / "coco" / "annotations" / f"{kind}_train2017.json").write_text(json.dumps(objects))
    _panoptic(root / "coco" / "annotations", objects["images"])
    (root / "bucket" / "photos").symlink_to(root / "coco" / "train2017")
    table = [f"{number}.jpg,green\n" for number in range(SAMPLES)]
    (root / "coco" / "train2017" / "train.csv").write_text("file,species\n" + "".join(table))
    write_shard(root / "scenes" / "a.tar", scenes)
    write_shard(root / "pairs" / "a.tar", pairs)
    captions = [
        (f"{number}.{ending}", content)
        for number, image in enumerate(images)
        for ending, content in (("jpg", image), ("json", b'{"captions": ["the red cat", "a cat"]}'))
    ]
    write_shard(root / "captions" / "a.tar", captions)
    for folder in ("chat", "chats", "llava"):
        (root / folder).mkdir()
    golden = json.loads((Path(__file__).parents[1] / "golden" / "chats.json").read_text())
    (root / "chat" / "tokenizer.json").write_text(json.dumps(golden["tokenizer"]))
    chat = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "x"}]
    (root / "chats" / "train-0.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * SAMPLES)
    write_llava(root)
    write_parquet(root / "preferences" / "a.parquet", {"chosen": [chat] * SAMPLES, "rejected": [chat] * SAMPLES})
    save(word_level(), root)
    line = json.dumps({"text": "the red cat", "meta": {"id": 7}}) + "\n"
    for folder in ("texts", "code"):
        (root / folder).mkdir()
    (root / "texts" / "train-0.jsonl").write_text(line * SAMPLES)
    _write_media(root)
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "my-code.md").read_text(), re.MULTILINE | re.DOTALL)
    (root / "code" / "digits.py").write_text(program)
    return root


def _write_media(root: Path) -> None:
    """A video, and sounds with their texts, which the lines of the page put together."""
    write_video(root / "videos" / "cats" / "a.mp4", frames=40)
    write_lerobot(root / "robot", Layout(videos=[f"observation.images.{camera}" for camera in CAMERAS]))
    with_sound(root / "clips" / "a.mp4", "aac")
    for part in ("train", "val"):
        (root / f"kinetics_{part}.csv").write_text("videos/cats/a.mp4 3\n" * SAMPLES)
    (root / "videos" / "captions.jsonl").write_text('{"video": "cats/a.mp4", "text": "the red cat"}\n' * SAMPLES)
    speech = root / "LibriSpeech" / "train-clean" / "84" / "121"
    speech.mkdir(parents=True)
    for number in range(SAMPLES):
        sound = stored("FLAC", "PCM_16", sweep(16_000, 1 + number / 4, 1), 16_000)
        (speech / f"84-121-{number:04}.flac").write_bytes(sound)
        word = root / "speech_commands" / ("yes", "no")[number % 2] / f"{number}.wav"
        word.parent.mkdir(parents=True, exist_ok=True)
        word.write_bytes(stored("WAV", "PCM_16", sweep(16_000, 0.9, 1), 16_000))
    (root / "speech_commands_val").symlink_to(root / "speech_commands")
    for name in ("noise/hum.wav", "RIRS_NOISES/simulated_rirs/room/1.wav"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(stored("WAV", "PCM_16", sweep(16_000, 0.3, 1), 16_000))
    words = [f"84-121-{number:04} the red cat" for number in range(SAMPLES)]
    (speech / "84-121.trans.txt").write_text("\n".join(words))
    (section,) = re.findall(r"^## Speech.*?\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    (lines,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(compile(placed(lines, root), "cookbook.md", "exec"), {})


def placed(text: str, data: Path) -> str:
    """Point a page's configuration to the test's data; a folder has the shards of the bucket."""
    return text.replace('"/data/', f'"{data}/').replace('"s3://', f'"{data}/')


@pytest.mark.parametrize(("title", "text"), RECIPES, ids=[title for title, _text in RECIPES])
def test_a_recipe_is_a_whole_configuration(title, text, data, tmp_path) -> None:
    """Each recipe passes the checks as it is, on data that exists."""
    file = tmp_path / "batchd.toml"
    file.write_text(placed(text, data))

    assert not [str(one) for one in read_config(file, environment={}).problems], title


@pytest.mark.thorough
def test_all_recipes_are_served(data, start_daemon) -> None:
    """One daemon has all of their streams; each gives a batch with the fields of the page."""
    assert len(RECIPES) == 31
    streams, python_path = {}, []
    for _title, text in RECIPES:
        recipe = tomllib.loads(placed(text, data))
        python_path += recipe.get("daemon", {}).get("python_path", [])
        streams |= {
            name: {**stream, "batch_size": 2, "window": 1, "memory": "12MiB"}
            for name, stream in recipe["streams"].items()
        }
    for name in ("imagenet-s3", "table-s3", "sweep"):
        streams[name]["cache_memory"] = "16MiB"
    streams["instances"]["memory"] = streams["detr"]["memory"] = "100MiB"
    streams["llava"]["memory"] = "48MiB"
    streams["kinetics"]["memory"] = "40MiB"
    streams["kinetics-val"] |= {"batch_size": 1, "memory": "160MiB"}
    streams["vlm"]["memory"] = "24MiB"
    (darker,) = re.findall(r'pipeline = (\[ \{ op = "call".*\])', (DOCS / "my-code.md").read_text())
    streams["darker"] = {**streams["own"], "pipeline": tomllib.loads(f"steps = {darker}")["steps"]}
    daemon = start_daemon(streams, python_path=python_path, memory="1GiB")

    with batchd_client.connect(daemon.address) as connection:
        with batchd_client.push("camera", daemon.address) as producer:
            for number in range(2):
                producer.put({"image": np.full((48, 64, 3), number, np.uint8), "label": number})
            seen = {name: first_shapes(connection, name) for name in streams}
        (own,) = islice(connection.stream("own"), 1)
        (dark,) = islice(connection.stream("darker"), 1)
        assert (dark["image"] == own["image"] // 2).all()
    for name in streams.keys() - {"darker"}:
        assert FIELDS.get(name, PHOTOGRAPHS).items() <= seen[name].items(), name


@pytest.mark.thorough
def test_a_sweep_is_four_streams_of_three_batch_sizes(data, start_daemon, monkeypatch) -> None:
    """The program of the page runs, with smaller batches; trainers of one augmentation share it."""
    recipe, program = recipe_and_program("A sweep")
    streams = tomllib.loads(placed(recipe, data))["streams"]
    streams["sweep"] |= {"batch_size": 8, "cache_memory": "16MiB"}
    daemon = start_daemon(streams, derive=True, memory="256MiB")
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)
    trained = []

    def train(name: str, stream: batchd_client.Stream) -> None:
        (batch,) = islice(stream, 1)
        trained.append((name, batch.samples, stream.name, stream.fingerprint))

    program = program.replace("(64, 128, 256)", "(2, 4, 8)")
    exec(compile(program, "cookbook.md", "exec"), {"train": train})

    assert [samples for _name, samples, *_rest in trained] == [2, 4, 8] * 4
    assert len({fingerprint for *_rest, fingerprint in trained}) == 4
    assert {served for name, _samples, served, _fingerprint in trained if name == "plain"} == {"sweep"}


def recipe_and_program(title: str) -> tuple[str, str]:
    """The configuration and the program of a section."""
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    (recipe,), (program,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", section, re.MULTILINE | re.DOTALL) for kind in ("toml", "python")
    )
    return recipe, program


@pytest.mark.thorough
def test_a_trial_of_ones_own_is_defined(data, start_daemon, monkeypatch) -> None:
    """The program of the page runs, with smaller batches, under the configuration above it."""
    recipe, program = recipe_and_program("A trial of one's own")
    whole = tomllib.loads(placed(recipe, data))
    define = {**whole["daemon"]["define"], "who": [f"user:{os.geteuid()}"], "memory": "16MiB"}
    whole["streams"]["shared"] |= {"batch_size": 8, "memory": "8MiB"}
    daemon = start_daemon(whole["streams"], define=define, memory="256MiB")
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)
    trained = {}

    def train(name: str, stream: batchd_client.Stream) -> None:
        (batch,) = islice(stream, 1)
        trained[name] = batch["image"].shape

    program = placed(program, data).replace('"batch_size": 512', '"batch_size": 4')
    exec(compile(program, "cookbook.md", "exec"), {"train": train})

    assert trained == {"small": (4, 96, 96, 3)}


def first_shapes(connection: batchd_client.Daemon, name: str) -> dict[str, tuple[int, ...]]:
    """Return the fields of a stream's first batch, with the shape of one sample each."""
    with connection.stream(name) as stream:
        (batch,) = islice(stream, 1)
        return {field: tuple(batch[field].shape[1:]) for field in batch}
