"""The worker process: takes orders, fills chunks, reports. It ends when its channel does.

__main__  process entry: arguments, signals, limits
loop      one message after the other
chunk     one order: read, decode, transform, written once into the slot
slots     the slots it may write
note      the row it has in hand, for whoever finds it dead
"""
