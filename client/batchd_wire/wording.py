"""Words that go with numbers, for every message to people. Every process; standard library only."""


def counted(count: int, noun: str) -> str:
    """Say how many: "1 worker", "2 batches". The noun is one whose plural is regular."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun if count == 1 else noun + plural}"
