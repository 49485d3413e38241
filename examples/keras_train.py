"""Keras on a folder of photographs, served by a daemon of this script; resumes after a stop.

    python examples/keras_train.py [--data /path/to/images] [--epochs 5]    Ctrl-C, then again

``--data`` has one sub-folder for each class; without it photographs are made. Model and position
are in ``demo/keras``. Needs, in a clone: pip install ./client . keras tensorflow; with
``--py-dataset`` another backend of Keras will do.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import keras

import batchd
import batchd_client
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd_client.keras import BatchdPyDataset, Progress

PHOTOS = 512
FOLDER = Path("demo") / "keras"
MODEL, POSITION = FOLDER / "last.keras", FOLDER / "position.json"
CONFIG = """\
[streams.photos]
source = {{ type = "folder", path = {source} }}
batch_size = 32
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [64, 64] }},
    {{ op = "random_flip" }},
]
"""


def photographs(data: str | None) -> Path:
    """The folder to serve: the one that was given, or generated photographs."""
    if data:
        return Path(data).expanduser().resolve()
    folder = (FOLDER / "photos").resolve()
    if sum(1 for _ in folder.glob("*/*.jpg")) != PHOTOS:
        make_photos(folder, PHOTOS, 0, lambda _made: None)
    return folder


def make_model(classes: int) -> Any:
    """A small one."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(classes, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(address: str, epochs: int, *, py_dataset: bool) -> None:
    """Train from the checkpoint on, if there is one; whatever ends it, there is one afterwards."""
    state = json.loads(POSITION.read_text()) if POSITION.exists() else None
    with batchd_client.connect(address) as daemon:
        photos = daemon.stream("photos", epochs=epochs, state=state)
        if photos.epoch >= epochs:
            print(f"all {epochs} epochs are done; delete {FOLDER}, or give more --epochs")
            return
        if py_dataset:
            data = BatchdPyDataset(photos)
        else:
            from batchd_client.tensorflow import dataset  # noqa: PLC0415  Keras may have another backend

            data = dataset(photos).prefetch(2)
        if state is None:
            model = make_model(len(photos.classes))
        else:
            print(f"going on in epoch {photos.epoch + 1}, behind {photos.step} of its {len(photos)} batches")
            saved = keras.models.load_model(MODEL)  # its optimizer too
            assert isinstance(saved, keras.Model)
            model = saved
        progress = Progress(photos)
        try:
            if photos.step:  # the rest of the epoch that was interrupted
                model.fit(data, initial_epoch=progress.epoch, epochs=progress.epoch + 1, callbacks=[progress])
            if progress.epoch < epochs:
                model.fit(data, initial_epoch=progress.epoch, epochs=epochs, callbacks=[progress])
        finally:
            model.save(MODEL)
            POSITION.write_text(json.dumps(progress.state_dict()))
            print(f"\nsaved {progress.state_dict()}")


def main() -> int:
    """Serve, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of images, with one sub-folder for each class")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--py-dataset", action="store_true", help="without tf.data")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    config = FOLDER / "batchd.toml"
    config.write_text(CONFIG.format(source=json.dumps(str(photographs(options.data)))))
    try:
        with batchd.serve(config) as address:
            train(address, options.epochs, py_dataset=options.py_dataset)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
