"""Whether the compiled extensions belong to the C sources beside them. Daemon and commands.

An editable installation gets new Python code by `git pull`, and keeps its old extensions until they
are compiled again. The build ID of an extension (a note in its ELF file, `ld --build-id`) is the
digest of its sources, which ``setup.py`` computes with this module: no number has to be raised by
hand. An installed wheel has no C sources, and all its parts are of one build.

Standard library only; ``setup.py`` runs this file by itself.
"""

import shlex
import sys
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

EXTENSIONS = (
    *(f"batchd.data.pipeline.{name}" for name in ("_jpeg", "_pixels", "_sound", "_words")),
    "batchd.data.storage._rows",
)


def sources_digest(folder: Path, name: str) -> str:
    """The digest of an extension's C sources and headers, in hexadecimal; "" if there are none."""
    digest, sources = sha256(), sorted(folder.glob(f"{name}*.[ch]"))
    for source in sources:
        digest.update(f"{source.name} {source.stat().st_size}\n".encode() + source.read_bytes())
    return digest.hexdigest() if sources else ""


@cache
def outdated_extension() -> str:
    """The problem of an extension that was compiled from other sources, and the remedy; or ""."""
    for extension in EXTENSIONS:
        spec = find_spec(extension)
        if spec is None or spec.origin is None:  # not compiled: each of them is optional
            continue
        file = Path(spec.origin)
        digest = sources_digest(file.parent, extension.rpartition(".")[2])
        if bytes.fromhex(digest) not in file.read_bytes():
            command = [sys.executable, "-m", "pip", "install", "--editable", str(Path(__file__).parents[2])]
            return (
                f"{file} was compiled from other sources than those beside it, as after an update of the source checkout; "
                f"compile it again: {shlex.join(command)}; or remove the file: batchd works without it, in more time"
            )
    return ""
