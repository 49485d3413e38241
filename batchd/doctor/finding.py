"""What a check has found. Runs in the user's shell."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters; in the order of their weight."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing need be done."""
    WARNING = "warning"
    """It will work, more slowly or less safely than it could."""
    PROBLEM = "problem"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people: what was looked at, what is there, and what helps ("" where nothing needs to)."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """As it should be."""
    return Finding(subject, Level.OK, found)


def note(subject: str, found: str, advice: str = "") -> Finding:
    """Good to know."""
    return Finding(subject, Level.NOTE, found, advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It could be better, and how."""
    return Finding(subject, Level.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """It does not work, and what has to be done."""
    return Finding(subject, Level.PROBLEM, found, advice)
