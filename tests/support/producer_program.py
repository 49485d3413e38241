"""A producer as a process of its own: pushes numbered frames and says each number once it is pushed. ``producers`` starts it.

Its argument is JSON: {"address": ..., "stream": ..., "first": 0, "count": 100}. Each number that
was pushed comes on a line of its own, and "dropped" in place of one that was not.
"""

import json
import sys

import batchd_client
from support.producers import frame


def main() -> None:
    """Push what the argument says, and then wait for the end of the input, as a camera that shows nothing new."""
    options = json.loads(sys.argv[1])
    with batchd_client.push(options["stream"], options["address"]) as producer:
        for number in range(options["first"], options["first"] + options["count"]):
            is_pushed = producer.put(frame(number))
            print(number if is_pushed else "dropped", flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
