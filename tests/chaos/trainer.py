"""A trainer of a chaos run, in its own process.

It reads until its input ends, and prints a line of JSON about each batch.

{"ready": true}                                       it has its stream
{"at": seconds, "epoch": 1, "step": 5, "rows": [[sample, digest], ...], "state": {...}, "again": n}
                                                      it has read a batch; it resubscribed n times
{"changed": [epoch, step]}                            a batch that it kept has changed
{"error": its class, "text": its message}             and it ends
{"left": [...]}                                       the resources that it holds at its end

A line is written at once, so the lines of a killed trainer are the batches that it has read, and
its successor continues at the last ``state``.
"""

import gc
import json
import random
import select
import sys
import time
from collections import deque
from typing import Any

import batchd_client
from support.kernel import descriptors_of, mapped_slots
from support.seen import rows_of

HELD_MAX = 2
KEEP_S = 1
"""How long a stream that it defines stays after its last trainer."""
_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:")


class Trainer:
    """Takes batches, and keeps some of them for a while."""

    def __init__(self, stream: batchd_client.Stream, seed: int, pause_max_s: float) -> None:
        self._stream = stream
        self._chance = random.Random(seed)
        self._pause_max_s = pause_max_s
        self._held: deque[tuple[batchd_client.Batch, list[tuple[int, str]]]] = deque()

    def read(self, batches: int | None) -> None:
        """Read epoch after epoch, until the input ends or so many batches were read."""
        taken = 0
        while batches is None or taken < batches:
            for batch in self._stream:
                self._look(batch)
                taken += 1
                if self._is_asked_to_end() or taken == batches:
                    self._release(0)
                    return

    def _look(self, batch: batchd_client.Batch) -> None:
        rows = rows_of(batch.items())
        say(
            at=time.monotonic(),
            epoch=batch.epoch,
            step=batch.step,
            rows=rows,
            state=self._stream.state_dict(),
            again=self._stream.statistics().resubscribed,
        )
        self._held.append((batch, rows))
        self._release(self._chance.randrange(HELD_MAX + 1))

    def _release(self, kept: int) -> None:
        """Release batches, except for some, and check that each is unchanged."""
        while len(self._held) > kept:
            batch, rows = self._held.popleft()
            with batch:
                if rows_of(batch.items()) != rows:
                    say(changed=[batch.epoch, batch.step])

    def _is_asked_to_end(self) -> bool:
        """Compute for a moment, as a training does; tell whether the input has ended."""
        return bool(select.select([sys.stdin], [], [], self._chance.uniform(0, self._pause_max_s))[0])


def say(**what: Any) -> None:
    """Write one line in one piece."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def holdings() -> set[str]:
    """Return all open descriptors and mappings except files."""
    held = {f"{number} -> {name}" for number, name in descriptors_of("self").items() if name.startswith(_KINDS)}
    return held | {f"{mapped_slots('self')} mapped slots"}


def main() -> None:
    """Connect, read, and end."""
    options = json.loads(sys.argv[1])
    before = holdings()
    try:
        with batchd_client.connect(**options["connect"]) as connection:
            table = {} if options["table"] is None else {"table": options["table"], "keep_s": KEEP_S}
            stream = (connection.define if table else connection.stream)(**options["stream"], **table)
            say(ready=True)
            Trainer(stream, options["seed"], options["pause_max_s"]).read(options["batches"])
    except batchd_client.BatchdClientError as error:
        say(error=type(error).__name__, text=str(error))
    gc.collect()
    say(left=sorted(holdings() - before))


if __name__ == "__main__":
    main()
