"""Decode each file of a folder, in its own process.

Prints the outcome, the growth of memory in bytes, and seconds of CPU.

python -m support.decoding_memory FOLDER        prints {"name": [outcome, bytes, seconds], ...}
"""

import json
import sys
from pathlib import Path
from time import process_time

from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.samples.errors import SampleUndecodable
from support.images import encode, photo
from support.pipelines import image_pipeline, run

KIBIBYTE = 1024


def memory(name):
    """Resident bytes, now ("VmRSS") or at their peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * KIBIBYTE


def measure(pipeline, data):
    """Decode one file."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present value
    before, started_s = memory("VmRSS"), process_time()
    try:
        run(pipeline, data)
        outcome = "image"
    except SampleUndecodable as error:
        outcome = str(error)
    return outcome, memory("VmHWM") - before, process_time() - started_s


if __name__ == "__main__":
    small = image_pipeline([Decode(), Resize(size=(32, 32))])
    for ending in (".png", ".webp", ".bmp", ".gif", ".jpg"):
        run(small, encode(photo(64, 64), ending))
    files = sorted(Path(sys.argv[1]).iterdir())
    sys.stdout.write(json.dumps({file.name: measure(small, file.read_bytes()) for file in files}) + "\n")
