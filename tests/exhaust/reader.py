"""The trainer of ``exhaust.py``.

It reads two epochs and exits with status 0, or with 3 after an error with a reason.

reader.py ADDRESS BATCHES...     prints "begun" after its imports, then a line for each batch
"""

import sys
from pathlib import Path

import batchd_client

sys.path.append(str(Path(__file__).parents[1]))

from support.seen import look_at

if __name__ == "__main__":
    print("begun", flush=True)
    try:
        with batchd_client.connect(sys.argv[1], connect_timeout_s=10.0, reconnect_timeout_s=10.0) as daemon:
            stream = daemon.stream("photos", epochs=2)
            for _ in range(2):
                for batch in stream:
                    with batch:
                        print(*look_at(batch)[::3], flush=True)
    except (batchd_client.errors.BatchdClientError, OSError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(3)
