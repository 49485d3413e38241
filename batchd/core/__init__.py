"""Decisions: events in, actions out. No process, no I/O, no clock, no logging.

plan          which sample is in which row of which batch; the shuffle
course        which positions one subscription reads, in order
readers       which subscription reads a position next, and how soon
ring          the slots of one stream and what is being filled into them
mailbox       which place of a live stream holds which sample
subscription  one trainer: where it is, what it wants, what it holds
pace          how far trainers of one stream may be apart
supply        how batches get their samples: stored, or pushed by producers
claims        which subscription may have one more slot, and which slot it is
delivery      what the trainers of one stream are handed and told
suspicion     bad samples, and which sample kills workers
fleet         workers, their orders, their restarts
state         the whole: one event, the time, a list of actions
events, actions, statistics   what the core is told, what it decides, what it counts
"""
