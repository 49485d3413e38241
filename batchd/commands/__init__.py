"""What a command does; ``batchd.cli`` is how it is typed and shown. None imports the daemon.

bench    measures a stream with a daemon and a trainer of its own, and beside a DataLoader
doctor   readings of the machine, and pure checks of them
history  the batch of a position again, without a daemon; which samples stand out in losses
prepare  the pipeline once, into shards
"""
