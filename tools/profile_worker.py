"""Draws where the CPU time of a worker goes while it serves photographs.

``make profile DATA=/path/to/photographs``

``perf`` samples the workers of a daemon that has no other work, after the first epoch, so crops are
decoded by access points. Samples are counted by library and function, so the parts of libjpeg-turbo
need its symbols: the daemon gets a copy that is linked from the system's ``libjpeg.a``, the same
version. Kernel time belongs to the system call in whose stack it is.

Needs perf (``apt-get install linux-perf``), gcc, libjpeg.a (of libjpeg62-turbo-dev), matplotlib,
and the right to see the kernel's functions (root).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import batchd
import batchd_client
from batchd.data.pipeline.image.jpeg_box import IS_BUILT

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "build" / "profile" / "libjpeg.so.62"
WORKERS, BATCH = 2, 256
RATE_HZ = 997
"""No multiple of the rate of any timer."""
LEAST = 0.002
"""A part with less than this is drawn with the others."""
OTHER = "others"
CONFIGURATION = """
[daemon]
workers = {workers}
http = "off"
[streams.photos]
source = {{ type = "folder", path = "{data}", allow_outside_root = true }}
batch_size = {batch}
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [224, 224] }},
    {{ op = "random_flip" }},
]
"""
KERNEL = "[kernel"
CALLS = (
    (r"page_fault", "page faults (kernel)"),
    (r"sys_(open|read|pread|newfstat|fstat|statx|close|lseek|mmap|munmap)", "read files (kernel)"),
    (r"sys_(sendmsg|recvmsg|poll|ppoll|epoll)", "messages to the daemon (kernel)"),
)
"""A function in a kernel stack, and what it is done for."""
FUNCTIONS = (
    (r"^libjpeg", r"huff|decode_mcu|fill_bit", "entropy decoding (libjpeg-turbo)"),
    (r"^libjpeg", r"idct", "inverse DCT (libjpeg-turbo)"),
    (r"^libjpeg", r"upsample|ycc|rgb|color|fancy", "upsampling, colours (libjpeg-turbo)"),
    (r"^libjpeg", r"", "other parts of libjpeg-turbo"),
    (r"^_jpeg\.", r"", "cut and splice the bits of the crop"),
    (r"^_pixels\.", r"", "resample (batchd)"),
    (r"^cv2\.", r"", "flip (OpenCV)"),
    (r"^(_philox|_generator|_common|bit_generator)\.", r"", "random numbers (NumPy)"),
    (r"^(libpython|python|_multiarray|libc\.|ld-linux|_cmsgpack|\[vdso)", r"", "Python: headers, plans, calls"),
)
"""A library, a function, and what they do; the first pair that fits counts."""


def main() -> int:
    """Profile, print, draw."""
    options = _options()
    if missing := [tool for tool in ("perf", "gcc") if shutil.which(tool) is None]:
        sys.exit(f"profile_worker needs {' and '.join(missing)}: apt-get install linux-perf gcc")
    if not IS_BUILT:
        sys.exit("batchd's JPEG extension is not built: apt-get install gcc libjpeg62-turbo-dev, make setup")
    _link_with_symbols()
    image_us, samples = _profile(options.data.resolve(), options.seconds)
    parts = parts_by_size(samples)
    for name, share in parts:
        print(f"{share:6.1%} {share * image_us:7.0f} us  {name}")
    print(f"{image_us:.0f} us of CPU for a photograph, {sum(samples.values())} samples")
    _draw(parts, image_us, options.picture)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of photographs, JPEG")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the profile (default: 20)")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "worker.svg")
    return parser.parse_args()


def _link_with_symbols() -> None:
    """Link the system's static libjpeg-turbo into a shared one that has all symbols.

    Its objects are made for programs, so the C library's ``stderr`` is out of their reach. They
    print to it where nothing replaces that, as batchd does: another ``stderr`` stands in.
    """
    shared = subprocess.check_output(["ldconfig", "-p"], text=True)
    system = re.search(r"libjpeg\.so\.62 .*=> (\S+)", shared)
    archive = subprocess.check_output(["gcc", "-print-file-name=libjpeg.a"], text=True).strip()
    if system is None or not Path(archive).is_file():
        sys.exit("profile_worker needs libjpeg.so.62 and libjpeg.a: apt-get install libjpeg62-turbo-dev")
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    exported = subprocess.check_output(["nm", "-D", "--defined-only", system[1]], text=True)
    of_turbo = "".join(f"{name};" for name in re.findall(r"(\w+)@@LIBJPEGTURBO_6\.2", exported))
    versions = LIBRARY.with_suffix(".map")
    versions.write_text(f"LIBJPEG_6.2 {{ global: *; }};\nLIBJPEGTURBO_6.2 {{ global: {of_turbo} }} LIBJPEG_6.2;\n")
    program = 'void *stderr __attribute__((visibility("hidden")));'
    options = ["-soname", LIBRARY.name, "--version-script", str(versions), "-Bsymbolic", "--whole-archive", archive]
    linking = ",".join(["-Wl", *options, "--no-whole-archive"])
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(LIBRARY), linking]
    subprocess.run(command, input=program, text=True, check=True)


def _profile(data: Path, seconds: float) -> tuple[float, Counter[str]]:
    """CPU of all workers for a photograph in us, and the samples of each part."""
    os.environ["LD_LIBRARY_PATH"] = str(LIBRARY.parent)
    with tempfile.TemporaryDirectory(prefix="batchd-profile-") as scratch:
        config, recorded = Path(scratch, "batchd.toml"), Path(scratch, "perf.data")
        config.write_text(CONFIGURATION.format(workers=WORKERS, batch=BATCH, data=data))
        with batchd.serve(config) as address, batchd_client.connect(address) as daemon:
            stream = daemon.stream("photos")
            batches = iter(batch for _ in iter(int, 1) for batch in stream)
            while stream.state_dict()["epoch"] < 1:
                next(batches).release()
            pids = [worker["pid"] for worker in daemon.status()["workers"]]
            what = ["-F", str(RATE_HZ), "-e", "cpu-clock", "-g", "-p", ",".join(map(str, pids))]
            with subprocess.Popen(["perf", "record", "-q", *what, "-o", recorded, "--", "sleep", f"{seconds}"]) as perf:
                before = _done(daemon, pids)
                until_s = time.monotonic() + seconds
                while time.monotonic() < until_s:
                    next(batches).release()
                cpu_s, images = (now - then for now, then in zip(_done(daemon, pids), before, strict=True))
                if perf.wait():
                    sys.exit("perf could not record: it needs root, or kernel.perf_event_paranoid = 1")
        text = subprocess.check_output(["perf", "script", "-i", recorded, "-F", "ip,sym,dso"], text=True)
    return 1e6 * cpu_s / images, Counter(map(part_of, filter(None, text.split("\n\n"))))


def _done(daemon: batchd_client.Daemon, pids: list[int]) -> tuple[float, int]:
    """CPU seconds of the workers, and samples that they have decoded."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    decoded = daemon.status()["streams"][0]["decoded_samples"]
    return sum(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK"), decoded


def part_of(stack: str) -> str:
    """The part of a sample, by its stack: a line for each function, the innermost first."""
    frames = re.findall(r"^\s*[0-9a-f]+ (.*) \((.*)\)$", stack, re.MULTILINE)
    if not frames:
        return OTHER
    function, library = frames[0][0], Path(frames[0][1]).name
    if frames[0][1].startswith(KERNEL):
        called = " ".join(name for name, place in frames if place.startswith(KERNEL))
        return next((part for pattern, part in CALLS if re.search(pattern, called)), "other work of the kernel")
    fits = (part for of, pattern, part in FUNCTIONS if re.search(of, library) and re.search(pattern, function))
    return next(fits, OTHER)


def parts_by_size(samples: Counter[str]) -> list[tuple[str, float]]:
    """Each part with its share, the largest first; small ones are one."""
    total = sum(samples.values())
    shares = {name: count / total for name, count in samples.most_common()}
    large = [(name, share) for name, share in shares.items() if share >= LEAST and name != OTHER]
    return [*large, (OTHER, 1.0 - sum(share for _, share in large))]


def _draw(parts: list[tuple[str, float]], image_us: float, file: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  tests of the rest have none
    from matplotlib.figure import Figure  # noqa: PLC0415  the same

    figure = Figure(figsize=(8.5, 0.32 * len(parts) + 0.9), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh([name for name, _ in parts], [100 * share for _, share in parts], color="#1f6f8b")
    axis.bar_label(bars, [f"{share:.1%}, {share * image_us:.0f} µs" for _, share in parts], padding=5, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.2, y=0.02)
    axis.set_xlabel(f"% of a worker's CPU time; {image_us:.0f} µs for a photograph")
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    # text stays text, and the same numbers give the same file
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "batchd"}):
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
