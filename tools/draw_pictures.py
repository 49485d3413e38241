"""Draws the pictures of the README and of docs/: the page, ``top``, ``why``, and contact sheets.

``make pictures``

A daemon serves generated photographs to two trainers that share a stream, and slow files to another
one. After a minute Chromium takes the page, and a pseudo-terminal the output of the commands. Then
a daemon serves the recipes of the cookbook that have a picture, over the same photographs or over
drawn scenes.
``make pictures`` gives the script a host name, a /srv and a network of its own, so a picture shows
nothing of the machine on which it was drawn.

Invariant: the pictures are output of the running program; only their size and colours are reduced.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from drawn_scenes import write_scenes
from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

import batchd
import batchd_client
from batchd.data.pipeline.image.synthetic_images import make_photos

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
BYTES_MAX = 100_000
"""Of a picture: pages load quickly, and the repository stays small."""
PLACE = Path("/srv")
PHOTOS = 512
OBSERVED_S = 60.0
COLUMNS = 118
PAGE, PAGE_WIDTH = {"width": 1100, "height": 1010}, 880
"""Size of the browser's window, and of the picture of it, in pixels."""
SHEET = (720, 203)
"""Width and height in pixels: two rows of eight images and their labels."""
SCENES = ("table-s3", "segmentation", "yolo", "detr", "instances", "panoptic", "poses")
"""Streams of the cookbook over drawn scenes, in batches of four."""
RECIPES = {
    "timm": (560, 163),
    "deit-3": (560, 163),
    "auto-augment": (560, 82),
    "mae": (560, 82),
    "simclr": (200, 333),
    "dino": (560, 127),
    "diffusion": (560, 82),
    **dict.fromkeys(SCENES, (560, 163)),
    "detr": (560, 160),
}
"""The same of a sheet for each stream of the cookbook; its width is that of the sheet, scaled."""
COLOURS = 256
TRAINERS = {"resnet-50": ("photos", 2.0), "vit-small": ("photos", 2.0), "unet": ("scans", 0.1)}
"""The stream of each trainer, and its seconds of computation for a batch."""
CONFIGURATION = f"""\
[daemon]
workers = 4
http = "127.0.0.1:7071"
[streams.photos]
source = {{ type = "folder", path = "{PLACE}/photos" }}
batch_size = 64
window = 4
memory = "128MiB"
pipeline = [{{ op = "decode" }}, {{ op = "random_resized_crop", size = [224, 224] }}, {{ op = "random_flip" }}]
[streams.scans]
source = {{ type = "python", function = "scans:Scans", fields = {{ image = "uint8[64,64,1]", label = "int64" }} }}
batch_size = 32
window = 4
memory = "1MiB"
"""
SCANS = """\
import time

import numpy as np


class Scans:
    \"\"\"Scans on a slow server: each takes 40 ms to arrive.\"\"\"

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.04)
        return np.full((64, 64, 1), index % 256, np.uint8), index % 10
"""


def main() -> None:
    """Serve, train, and draw. Exits with a message if the machine lacks something."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("draw_pictures: there is no Chromium: apt-get install chromium")
    if any(PLACE.iterdir()):
        sys.exit(f"draw_pictures: {PLACE} has files; run make pictures, which gives the script an empty one")
    make_photos(PLACE / "photos", PHOTOS, 0, lambda _made: None)
    configuration = PLACE / "batchd.toml"
    configuration.write_text(CONFIGURATION)
    (PLACE / "scans.py").write_text(SCANS)
    with ExitStack() as stack:
        address = stack.enter_context(batchd.serve(configuration))
        for name, (stream, seconds) in TRAINERS.items():
            command = [sys.executable, __file__, address, name, stream, str(seconds)]
            stack.callback(subprocess.Popen(command).kill)
        time.sleep(OBSERVED_S)
        for name in ("top", "why"):
            keep(f"{name}.svg", drawn_terminal(name, address))
        page = Image.open(BytesIO(drawn_page(browser)))
        keep("page.png", fewer_colours(page, (PAGE_WIDTH, page.height * PAGE_WIDTH // page.width)))
        keep("batch.png", drawn_sheet(address, "photos", SHEET))
    write_scenes(PLACE)
    configuration.write_text("".join(['[daemon]\nmemory = "8GiB"\n', *map(recipe, RECIPES)]))
    with batchd.serve(configuration) as address:
        for stream, size in RECIPES.items():
            keep(f"{stream}.png", drawn_sheet(address, stream, size))


def recipe(stream: str) -> str:
    """Return a stream of the cookbook, over the photographs or scenes, in batches of one row."""
    text = (PICTURES.parent / "cookbook.md").read_text()
    (found,) = re.findall(rf"^\[streams\.{stream}\]\n.*?(?=^\[|^```)", text, re.MULTILINE | re.DOTALL)
    rows = 4 if stream in SCENES else 8
    found = re.sub(r"batch_size = \d+", f"batch_size = {rows}", found).replace(
        "/data/imagenet/train", f"{PLACE}/photos"
    )
    return found.replace('"/data/', f'"{PLACE}/').replace('"s3://', f'"{PLACE}/').replace("balance = 8\n", "")


def keep(name: str, content: bytes) -> None:
    """Write a picture, unless it is too large."""
    if len(content) > BYTES_MAX:
        sys.exit(f"draw_pictures: {name} has {len(content):,} bytes, more than {BYTES_MAX:,}")
    (PICTURES / name).write_bytes(content)
    print(f"{name}: {len(content):,} bytes")


def train(address: str, name: str, stream: str, seconds: float) -> None:
    """Read batches without end, and compute for some seconds on each."""
    with batchd_client.connect(address, name=name) as daemon:
        batches = daemon.stream(stream)
        while True:
            for _batch in batches:
                time.sleep(seconds)


def batchd_command(name: str, address: str) -> list[str]:
    """Return the command line, for this address."""
    return [sys.executable, "-m", "batchd", name, "--address", address]


def drawn_terminal(name: str, address: str) -> bytes:
    """Return an SVG picture of a terminal in which ``batchd NAME`` was typed."""
    once = ["--once", "--interval", "5"] if name == "top" else []
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "60"}
    with subprocess.Popen(
        [*batchd_command(name, address), *once],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as command:
        os.close(theirs)
        output = bytearray()
        try:
            while part := os.read(ours, 1 << 16):
                output += part
        except OSError:  # Linux ends a pseudo-terminal with EIO
            pass
        finally:
            os.close(ours)
    if command.returncode:
        sys.exit(f"draw_pictures: batchd {name} failed: {output.decode()}")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: PTH123, SIM115
    console.print(Text.assemble("$ ", (f"batchd {name}", "bold")))
    console.print(Text.from_ansi(output.decode().replace("\r\n", "\n").rstrip()))
    console.print()
    svg = console.export_svg(title="", unique_id=name)
    # Without the fonts of other hosts: viewers do not load them, and the site must not.
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).encode()


def drawn_page(browser: str) -> bytes:
    """Return a PNG picture of the top of the daemon's page."""
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport=PAGE)
        page.goto("http://127.0.0.1:7071")
        page.locator("svg.plot path.line[d^=M]").first.wait_for(state="attached")
        picture = page.screenshot()
        chromium.close()
    return picture


def drawn_sheet(address: str, stream: str, size: tuple[int, int]) -> bytes:
    """Return a PNG picture of the top of a contact sheet of a stream's first batch."""
    sheet = PLACE / "sheet.png"
    subprocess.run([*batchd_command("peek", address), stream, "-o", sheet], check=True, stdout=subprocess.DEVNULL)
    picture = Image.open(sheet)
    return fewer_colours(picture.crop((0, 0, picture.width, picture.width * size[1] // size[0])), size)


def fewer_colours(picture: Image.Image, size: tuple[int, int]) -> bytes:
    """Return a PNG file of a picture, scaled to ``size`` in pixels, of ``COLOURS`` colours."""
    scaled = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    file = BytesIO()
    scaled.quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        address, name, stream, seconds = sys.argv[1:]
        train(address, name, stream, float(seconds))
    else:
        main()
