"""Train a small model in JAX on photographs that batchd serves.

Press Ctrl-C, run it again, and it goes on where it was.

Serves a folder with one sub-folder for each class (generated photographs, if none is given) as a
child of this script. The checkpoint holds the parameters and the position in the data, always of
the same step. Needs, in a clone: pip install ./client . jax

    python examples/jax_train.py [--data /path/to/images] [--epochs 20] [--folder demo/jax]
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import batchd
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd.errors import BatchdError
from batchd_client import BatchdClientError, StreamState
from batchd_client.jax import BatchdLoader

SIDE_PIXELS = 64
WIDTHS = (3, 16, 32, 64)
LEARNING_RATE = 0.03
MOMENTUM = 0.9
CONFIG = """\
[streams.photos]
source = {{ type = "folder", path = {source} }}
batch_size = 16
drop_last = true                # all batches have one shape, so the step is compiled once
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [{side}, {side}] }},
    {{ op = "random_flip" }},
]
"""

Parameters = dict[str, jax.Array]


class Trained(NamedTuple):
    """What a step changes."""

    parameters: Parameters
    velocity: Parameters


# --- the model ------------------------------------------------------------------------------------


def start(classes: int) -> Trained:
    """Parameters to begin with: three convolutions, each of half the size, and a linear layer."""
    random = np.random.default_rng(0)
    shapes = {f"convolution{i}": (3, 3, *WIDTHS[i : i + 2]) for i in range(len(WIDTHS) - 1)}
    shapes["linear"] = (WIDTHS[-1], classes)
    parameters = {
        name: jnp.asarray(random.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    return Trained(parameters, jax.tree.map(jnp.zeros_like, parameters))


def loss_of(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy.

    Images come as they were decoded, uint8 [B, H, W, C]; what they shall be is part of the step.
    """
    x = images.astype(jnp.float32) / 127.5 - 1
    for i in range(len(WIDTHS) - 1):
        kernel = parameters[f"convolution{i}"]
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    scores = jax.nn.log_softmax(x.mean(axis=(1, 2)) @ parameters["linear"])
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


@jax.jit
def step(trained: Trained, images: jax.Array, labels: jax.Array) -> tuple[Trained, jax.Array]:
    """One step down the gradient, with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(trained.parameters, images, labels)
    velocity = jax.tree.map(lambda old, slope: MOMENTUM * old + slope, trained.velocity, gradients)
    parameters = jax.tree.map(lambda old, speed: old - LEARNING_RATE * speed, trained.parameters, velocity)
    return Trained(parameters, velocity), loss


# --- the training ---------------------------------------------------------------------------------


def train(address: str, checkpoint: Path, epochs: int) -> None:
    """Go on from the checkpoint, if there is one, and leave one behind."""
    with BatchdLoader("photos", address=address, epochs=epochs) as loader:
        trained = start(len(loader.stream.classes))
        if checkpoint.exists():
            trained, state = load(checkpoint, trained)
            loader.load_state_dict(state)
            print(f"going on at epoch {state['epoch']}, step {state['step']}", flush=True)
        done = trained, loader.state_dict()
        try:
            for epoch in range(loader.epoch, epochs):
                losses = []
                for batch in loader:
                    trained, loss = step(trained, batch["image"], batch["label"])
                    done = trained, loader.state_dict()
                    losses.append(loss)
                # np.mean() of JAX arrays would make an error of Ctrl-C
                loss = sum(map(float, losses)) / len(losses)
                print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
        finally:  # after Ctrl-C too: wherever it hits, both parts of `done` are of the same step
            save(checkpoint, *done)


def save(checkpoint: Path, trained: Trained, state: StreamState) -> None:
    """Write the checkpoint, all of it or nothing."""
    new = checkpoint.with_suffix(".new.npz")
    np.savez(new, *jax.tree.leaves(trained), state=np.array(json.dumps(state)))
    new.replace(checkpoint)


def load(checkpoint: Path, like: Trained) -> tuple[Trained, StreamState]:
    """Read what ``save`` wrote."""
    leaves, form = jax.tree.flatten(like)
    with np.load(checkpoint) as saved:
        arrays = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(form, arrays), json.loads(str(saved["state"]))


def main() -> int:
    """Serve the photographs and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of images, with one sub-folder for each class")
    parser.add_argument("--photographs", type=int, default=256, help="how many are made, where --data is not given")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--folder", type=Path, default=Path("demo/jax"), help="for the checkpoint and generated photographs"
    )
    options = parser.parse_args()
    folder, data = options.folder, options.data or options.folder / "photos"
    folder.mkdir(parents=True, exist_ok=True)
    config, checkpoint = folder / "batchd.toml", folder / "checkpoint.npz"
    try:
        if not data.exists():
            make_photos(data, options.photographs, 0, partial(print, "photographs made:"))
        config.write_text(CONFIG.format(source=json.dumps(str(data.expanduser().resolve())), side=SIDE_PIXELS))
        with batchd.serve(config) as address:
            train(address, checkpoint, options.epochs)
    except (BatchdError, BatchdClientError) as error:
        print(f"jax_train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {checkpoint}")
        return 130
    print(f"trained; {checkpoint} has the parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
