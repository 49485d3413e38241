"""Words for messages to users that several processes say. Every process; standard library only."""

from collections.abc import Sequence

READ_PART = "read"
KEEP_PART = "cache"
BAD_PART = "bad samples"
"""Names of ``PartStatistics`` beside the steps: reading, writing to a cache, and bad samples."""


def classes_apart(name: str, classes: Sequence[str], other: str, others: Sequence[str]) -> str:
    """How the labels of two streams differ that have classes in common; "" if they do not."""
    labels = {known: label for label, known in enumerate(others)}
    if not labels.keys() & set(classes):
        return ""
    for label, known in enumerate(classes):
        if labels.get(known, label) != label:
            return f"{known!r} is label {label} in {name} and {labels[known]} in {other}"
    for one, mine, another, theirs in ((name, classes, other, others), (other, others, name, classes)):
        more = [known for known in mine if known not in set(theirs)]
        if more:
            return f"{more[0]!r} is a class of {one} and not of {another}"
    return ""


def counted(count: int, noun: str) -> str:
    """Format a count: "1 worker", "2 batches". The noun must have a regular plural."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun if count == 1 else noun + plural}"


def duration(seconds: float) -> str:
    """A length of time in one or two units: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min."""
    if seconds < 10:  # noqa: PLR2004  below it tenths tell something
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
