"""The configuration: one frozen tree, and how it is read from batchd.toml."""
