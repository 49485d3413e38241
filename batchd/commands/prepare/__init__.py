"""``batchd prepare``: run a pipeline once over all samples of a stream, into shards.

run       the command's process: the missing shards, and the WRITER processes that write them
folder    the same process: the folder of the shards, what is in it, and what was left out
__main__  process entry of a WRITER
shards    a WRITER: order -> read -> pipeline -> encode -> tar file

Invariant: a shard with its final name and its recorded size is whole. After any interruption, the
same command writes the missing shards.
"""
