"""A stand-in for ``batchd worker``, which actors on Ray keep alive. Standard library only.

    python stand_in_host.py FOLDER [refuse] ADDRESS --key FILE --workers N ...

While it runs, ``FOLDER/PID.json`` has its arguments, a digest of its key, and its parent. SIGTERM
ends it with status 0, which it notes in ``FOLDER/left``; with ``refuse`` it ends at once with one
sentence.
"""

import hashlib
import json
import os
import signal
import stat
import sys
from pathlib import Path

folder, *arguments = sys.argv[1:]
if arguments[0] == "refuse":
    sys.exit("the daemon rejects this worker host: its key was revoked")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
key = Path(arguments[arguments.index("--key") + 1])
facts = {
    "arguments": arguments,
    "key": hashlib.sha256(key.read_bytes()).hexdigest(),
    "key_mode": stat.S_IMODE(key.stat().st_mode),
    "parent": os.getppid(),
    "ray": sorted(name for name in os.environ if name.startswith("RAY_")),
}
file = Path(folder, f"{os.getpid()}.json")
file.with_suffix(".new").write_text(json.dumps(facts))
file.with_suffix(".new").rename(file)
sys.stdout.write(f"serving {arguments[0]}\n")
sys.stdout.flush()
signal.sigwait({signal.SIGTERM})
with Path(folder, "left").open("a") as left:
    left.write(f"{os.getpid()}\n")
file.unlink()
