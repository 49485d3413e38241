"""The source ``lmdb``: records of a key-value database."""
