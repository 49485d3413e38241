"""``batchd prepare``: run a pipeline once over all samples of a stream, into shards.

run     the missing shards, which workers write (``worker.tasks``), and the source that reads them
folder  the folder of the shards, what is in it, and what was left out

Invariant: a shard with its final name and its recorded size is whole. After any interruption, the
same command writes the missing shards.
"""
