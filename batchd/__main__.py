"""The command ``batchd``, also as ``python -m batchd``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is still loaded is as quiet as later."""
    try:
        from batchd.cli.main import main as run_command_line  # noqa: PLC0415  guarded
    except KeyboardInterrupt:
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
