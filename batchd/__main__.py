"""``python -m batchd``: the same as the ``batchd`` command."""

from batchd.cli.main import main

main()
