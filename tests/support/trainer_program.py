"""A trainer in its own process that obeys commands, a line of JSON at a time.

``trainer_process`` starts it.

{"do": "take", "batches": 3}         -> {"seen": [epoch, step, samples, digest]} ... {"done": true}
{"do": "hold", "batches": 3}         -> the same, and keeps them
{"do": "look"}                       -> the same for all held batches, with their present bytes
{"do": "release"}  "state"  "statistics"  "fork"   -> {"done": ...}
an exception ends it                 -> {"error": its class, "text": its message}
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import batchd_client
from support.seen import look_at


class Trainer:
    """Holds a connection, a stream and some batches."""

    def __init__(self, stream: batchd_client.Stream, epochs: int) -> None:
        self._stream = stream
        self._epochs = epochs
        self._kept: list[batchd_client.Batch] = []
        self._batches = self._run()

    def take(self, batches: int | None = None) -> None:
        """Take, read and release batches: so many, or all that are left."""
        taken = 0
        while (batches is None or taken < batches) and (batch := next(self._batches, None)) is not None:
            with batch:
                say(seen=look_at(batch))
            taken += 1
        say(done=taken)

    def hold(self, batches: int) -> None:
        """Take batches and keep them."""
        for _ in range(batches):
            self._kept.append(next(self._batches))
            say(seen=look_at(self._kept[-1]))
        say(done=batches)

    def look(self) -> None:
        """Read the held batches once more."""
        for batch in self._kept:
            say(seen=look_at(batch))
        say(done=len(self._kept))

    def release(self) -> None:
        """Release the held batches."""
        while self._kept:
            self._kept.pop().release()
        say(done=True)

    def state(self) -> None:
        """Return the content of a checkpoint."""
        say(done=self._stream.state_dict())

    def statistics(self) -> None:
        """Return its statistics."""
        say(done=asdict(self._stream.statistics()))

    def fork(self) -> None:
        """Fork a child that does nothing, and return its process id."""
        child = os.fork()
        if child == 0:
            signal.pause()
        say(done=child)

    def _run(self) -> Iterator[batchd_client.Batch]:
        while self._stream.epoch < self._epochs:
            yield from self._stream


def say(**what: Any) -> None:
    """Print one line for the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Obey commands until the end of the input."""
    options = json.loads(sys.argv[1])
    os.environ.setdefault("BATCHD_NAME", "trainer_program.py")  # no process number, for tests
    epochs = options["stream"]["epochs"]
    try:
        with batchd_client.connect(**options["connect"]) as connection:
            trainer = Trainer(connection.stream(**options["stream"]), epochs)
            say(done="ready")
            for line in sys.stdin:
                order = json.loads(line)
                getattr(trainer, order.pop("do"))(**order)
    except batchd_client.BatchdClientError as error:
        say(error=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main()
