"""``batchd demo``: two trainers, one daemon. Runs in the user's shell.

Serves a folder of photographs (generated ones, if none is given) as a child of this process,
attaches two trainers as processes of their own, shows what they get, and draws a contact sheet of a
batch.

Invariant: each photograph of an epoch is decoded once, and nothing is left running.
"""

import json
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.live import Live
from rich.table import Table

import batchd
import batchd_client
from batchd.cli import terminal
from batchd.cli.options import as_command, option
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd.data.storage.paths import absent
from batchd.errors import BatchdError
from batchd.observe.columns import MIDDLE
from batchd.runtime.suggestions import own_command

PHOTOS = 512
BATCH_SIZE = 64
TRAINERS = ("trainer A", "trainer B")
SHOWN_EVERY_S = 0.25
COLUMN_WIDTH = 12
FOLDER = Path("demo")
CONFIG = """\
# Written by `batchd demo`; `batchd serve {path}` serves the same.
[streams.photos]
source = {{ type = "folder", path = {source} }}
batch_size = {batch_size}
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [224, 224] }},
    {{ op = "random_flip" }},
]
"""


@as_command("demo")
def command(
    *,
    data: Annotated[
        str | None,
        option("Your images, with or without a sub-folder for each class. [default: generated]", metavar="FOLDER"),
    ],
    epochs: Annotated[int, option("How often each trainer reads them.", limits=(1, None))] = 3,
    folder: Annotated[
        Path, option("Where generated images, the configuration and the picture of a batch go.", metavar="PATH")
    ] = FOLDER,
    trainer: Annotated[str | None, option("Be one of its trainers.", metavar="ADDRESS", hidden=True)],
) -> None:
    """Serve photographs to two trainers, show what they get, and draw a batch."""
    if trainer is not None:
        with suppress(KeyboardInterrupt):  # the demo says it
            train(trainer, epochs)
    else:
        run(data, folder, epochs)


# --- what a trainer is: the whole of it -----------------------------------------------------------


def train(address: str, epochs: int) -> None:
    """Read every batch and pixel of ``epochs`` epochs; report to the demo in lines of JSON."""
    with batchd_client.connect(address) as daemon:
        photos = daemon.stream("photos", epochs=epochs)
        tell(batches=0, samples=0, of=len(photos) * epochs, wait_s=0.0, seconds=0.0)
        sys.stdin.readline()
        begun_s = time.perf_counter()
        batches = samples = 0
        wait_s = 0.0
        for _epoch in range(epochs):
            for batch in photos:
                batch["image"].sum(dtype=np.int64)
                batches += 1
                samples += batch.samples
                wait_s += batch.wait_s
                seconds = time.perf_counter() - begun_s
                tell(batches=batches, samples=samples, of=len(photos) * epochs, wait_s=wait_s, seconds=seconds)


def tell(**numbers: float) -> None:
    """Write one line for the demo."""
    terminal.emit(json.dumps(numbers))


# --- what the demo does around it -----------------------------------------------------------------


@dataclass(slots=True)
class Trainer:
    """A trainer process, and its last line."""

    name: str
    process: subprocess.Popen[str]
    progress: dict[str, float] = field(default_factory=dict)


@contextmanager
def trainers(address: str, epochs: int) -> Iterator[list[Trainer]]:
    """Start the trainers; none outlives the context."""
    command = [sys.executable, "-m", "batchd", "demo", "--trainer", address, "--epochs", str(epochs)]
    with ExitStack() as stack:
        started = []
        for name in TRAINERS:
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            started.append(Trainer(name, process))
        yield started


def watch(running: list[Trainer]) -> None:
    """Begin together, and show what the trainers tell until both are done."""
    for trainer in running:
        assert trainer.process.stdout is not None, "a pipe"
        trainer.progress = json.loads(trainer.process.stdout.readline() or "{}")
        if not trainer.progress:
            raise BatchdError(f"{trainer.name} did not start; its message is above")
    for trainer in running:
        assert trainer.process.stdin is not None, "a pipe"
        trainer.process.stdin.write("go\n")
        trainer.process.stdin.flush()
    with Live(table(running), console=terminal.console_of(), auto_refresh=False) as live:
        shown_s = 0.0
        for _line in lines(running):
            if time.monotonic() - shown_s > SHOWN_EVERY_S:
                shown_s = time.monotonic()
                live.update(table(running), refresh=True)
        live.update(table(running), refresh=True)
    for trainer in running:
        if trainer.process.wait():
            raise BatchdError(f"{trainer.name} ended with exit status {trainer.process.returncode}")


def lines(running: list[Trainer]) -> Iterator[None]:
    """Take in what the trainers tell, line by line, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for trainer in running:
            assert trainer.process.stdout is not None, "a pipe"
            selector.register(trainer.process.stdout, selectors.EVENT_READ, trainer)
        while selector.get_map():
            for key, _events in selector.select():
                line = key.data.process.stdout.readline()
                if not line:
                    selector.unregister(key.fileobj)
                    continue
                key.data.progress = json.loads(line)
                yield


def table(running: list[Trainer]) -> Table:
    """How far each trainer is."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    is_wide = terminal.columns() >= MIDDLE
    for index, column in enumerate(("", "batches", "images", "images/s", "waited")):
        drawn.add_column(
            column, justify="right" if index else "left", min_width=COLUMN_WIDTH if is_wide else None, no_wrap=True
        )
    for trainer in running:
        progress = trainer.progress
        share = progress["wait_s"] / progress["seconds"] if progress["seconds"] else 0.0
        drawn.add_row(
            trainer.name,
            f"{progress['batches']:.0f} of {progress['of']:.0f}",
            f"{progress['samples']:,.0f}",
            f"{progress['samples'] / progress['seconds']:,.0f}" if progress["seconds"] else "-",
            f"{progress['wait_s']:.1f} s ({share:.0%})",
        )
    return drawn


def photographs(data: str | None, folder: Path) -> Path:
    """The folder to serve: ``data``, or generated photographs in ``folder``."""
    if data:
        return Path(data).expanduser().resolve()
    folder = (folder / "photos").resolve()
    if sum(1 for _ in folder.glob("*/*.jpg")) == PHOTOS:
        return folder
    with terminal.progress() as progress:
        task = progress.add_task(f"making {PHOTOS} photographs", total=PHOTOS)
        make_photos(folder, PHOTOS, 0, lambda made: progress.update(task, completed=made))
    terminal.say(f"made {PHOTOS} photographs in {folder}")
    return folder


def run(data: str | None, folder: Path, epochs: int) -> None:
    """Serve, train, and draw."""
    if data and not (given := Path(data).expanduser()).exists():
        raise BatchdError(f"{absent('folder', given)}; --data takes one with images")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        source = photographs(data, folder)
    except OSError as error:
        raise BatchdError(f"{error.filename}: {error.strerror}; --folder names another place") from None
    config, sheet = folder / "batchd.toml", folder / "sheet.png"
    text = CONFIG.format(path=config, source=json.dumps(str(source)), batch_size=BATCH_SIZE)
    config.write_text(text, encoding="utf-8")
    with batchd.serve(config) as address:
        terminal.say(f"serving {source} at {address}", "")
        with trainers(address, epochs) as running:
            watch(running)
        with batchd_client.connect(address) as daemon:
            status: Any = daemon.status()
        peek = [sys.executable, "-m", "batchd", "peek", "photos", "--address", address, "-o", str(sheet)]
        subprocess.run(peek, check=True, stdout=subprocess.DEVNULL)
    photos = status["streams"][0]
    terminal.say(
        "",
        f"{photos['decoded_batches']} batches were decoded once and handed out {photos['delivered_batches']} times; "
        f"{photos['shared_batches']} of them were read by both trainers.",
    )
    if photos["bad_samples"]:
        terminal.say(f"{photos['bad_samples']} samples were bad and had another in their place.")
    terminal.say(f"A batch as a picture: {sheet.resolve()}")
    terminal.emit(f"\nNext: {own_command()} init {shlex.quote(data) if data else 'YOUR_FOLDER'}")
