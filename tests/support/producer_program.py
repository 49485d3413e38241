"""A producer in its own process, started by ``producers``.

It pushes numbered frames, and prints each number once it is pushed.

Its argument is JSON: {"address": ..., "stream": ..., "first": 0, "count": 100}. It prints each
pushed number on a line of its own, and "dropped" for a number that was not pushed.
"""

import json
import sys

import batchd_client
from support.producers import frame


def main() -> None:
    """Push as the argument says, then wait for the end of the input, like a camera without news."""
    options = json.loads(sys.argv[1])
    with batchd_client.push(options["stream"], options["address"]) as producer:
        for number in range(options["first"], options["first"] + options["count"]):
            is_pushed = producer.put(frame(number))
            print(number if is_pushed else "dropped", flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
