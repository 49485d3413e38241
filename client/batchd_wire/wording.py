"""Numbers with nouns, for messages to users. Every process; standard library only."""


def counted(count: int, noun: str) -> str:
    """Format a count: "1 worker", "2 batches". The noun must have a regular plural."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun if count == 1 else noun + plural}"
