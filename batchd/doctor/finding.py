"""The result of a check. Runs in the user's shell."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    """Good to know; no action needed."""
    WARNING = "warning"
    """It works, but could be faster or safer."""
    PROBLEM = "problem"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the user: the subject, its state, and what helps ("" if nothing is needed)."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """All right."""
    return Finding(subject, Level.OK, found)


def note(subject: str, found: str, advice: str = "") -> Finding:
    """Good to know."""
    return Finding(subject, Level.NOTE, found, advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It works, but could be better; ``advice`` says how."""
    return Finding(subject, Level.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """It does not work; ``advice`` says what helps."""
    return Finding(subject, Level.PROBLEM, found, advice)
