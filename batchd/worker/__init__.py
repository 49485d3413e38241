"""The worker process: takes orders, fills chunks, reports. It ends when its channel does.

__main__     process entry: arguments, signals, limits
fork_server  the process that imports everything once, and of which each worker is a fork
loop         one message after the other
chunk        one order: read, decode, transform, written once into the slot
sample_maker one sample: read, then the steps; `batchd prepare` uses it, too
slots        the slots it may write
note         the row it has in hand, for whoever finds it dead
"""
