"""The configuration: one frozen tree and its way from batchd.toml. Imports nothing here, because workers need parts of it."""
