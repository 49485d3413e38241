"""``batchd prepare``: a stream's samples, through its pipeline once, into shards or files on the disk.

run       the command's process: which shards are missing, who writes them, what became of them
writers   the same process: the writing processes, their deaths, and the sample that each has in hand
__main__  process entry of a WRITER
shards    a WRITER: order -> read -> pipeline -> encode -> what a sink makes of it
sinks     one tar file, or files of their own with a list
members   the values of a sample as members of a tar file
lists     the command's process: the lists of files become one

Invariant: a shard that has its name and its noted size is whole. Whatever ends a process, the same
command goes on with what is missing.
"""
