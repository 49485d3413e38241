"""Length of a user's dataset. HELPER process, ``python -m batchd.data.sources.code.length FD``.

It makes the user's object once, so that the daemon imports none of its code. The request is JSON on
standard input, and the answer is JSON on the descriptor. Output of the object and errors are
written to standard error, which the daemon shows after a failure.
"""

import json
import os
import sys

from batchd.data.functions.load import FunctionFailed, FunctionUnusable, call, expect
from batchd.data.sources.code.reader import make_object
from batchd.runtime.children import die_with_parent, print_to_the_log


def main() -> int:
    """Ask and answer; the exit status."""
    die_with_parent()
    result_descriptor = int(sys.argv[1])
    asked = json.load(sys.stdin)
    print_to_the_log()
    expect(asked["python_path"], asked["code"])
    try:
        length = call(len, make_object(asked["function"], asked["options"]))
    except (FunctionUnusable, FunctionFailed) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    os.write(result_descriptor, json.dumps({"length": length}).encode())
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that the object has started are not waited for
