"""The source ``jsonl``: lines of JSON."""
