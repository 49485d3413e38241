"""The worker process: takes orders, fills chunks, reports. It ends when its channel does.

__main__     process entry
fork_server  the process that imports everything once, itself a fork of the daemon or a process of
             its own; each worker is a fork of it
loop         one order after the other: planned, requested, filled, reported
filling      how the rows of a chunk are filled: one by one, or many at once; packs: of documents
blocks       the blocks of a shuffle, read ahead from servers
sample_maker one sample: read, then the steps; others: the samples that join one
stopwatch    where the time of a chunk went
process      the beginning of each process that decodes, and its note
messages     orders to workers and their reports, always of the same version
tasks        other orders than rows: write a shard, measure samples; members: of a shard

interface    workers, as the daemon's loop has them; supervisor: worker processes of this host
order_runner worker processes that carry out orders, without the daemon's loop
"""
