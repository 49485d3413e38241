"""Decisions, without a process: events in, actions out. No I/O, no clock, no logging; tested without any process.

permutation   the shuffle, a keyed bijection
plan          which sample stands where in which batch
course        which positions one subscription reads, in order
ring          the slots of one stream and what is being filled into them
mailbox       of a live stream: which place holds which sample
subscription  one trainer's claim: where it is, what it wants, what it holds
delivery      the rules between one ring and its subscriptions
suspicion     bad samples, and which sample kills workers
fleet         workers, their orders, their restarts
state         the whole: one event, the time, a list of actions
events, actions, statistics   the words
"""
