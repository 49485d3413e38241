"""How the daemon's log looks: lines for people on a terminal, JSON otherwise. Set once, at the start of a process.

Levels by audience: DEBUG the developer, INFO one line for each event in the life of the daemon, WARNING it healed itself, ERROR
somebody must act.
"""

import logging
import sys

import structlog


def set_up_logs(level: str) -> None:
    """Write what is at least ``level`` (a name of ``logging``) to standard error."""
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer(colors=True) if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
