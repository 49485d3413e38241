"""Numbers and nouns in messages agree."""

import pytest

from batchd_wire.wording import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "worker", "0 workers"),
        (1, "worker", "1 worker"),
        (2, "worker death", "2 worker deaths"),
        (1, "batch", "1 batch"),
        (12_345, "batch", "12,345 batches"),
    ],
)
def test_a_noun_is_as_many_as_its_number(count, noun, text) -> None:
    """One is singular, and zero is plural."""
    assert counted(count, noun) == text
