"""Decisions: events in, actions out. No process, no I/O, no clock, no logging.

plan          the sample in each row of each batch; the shuffle
blocks        a shuffle that keeps neighbours in storage near each other
buckets       batches of samples of similar size; packs: rows of several documents
draws         samples drawn by weight; mixtures: sources mixed by shares that change
epochs        what of these decides the order of an epoch, as workers get it
mixing        which rows of a batch are mixed with which; erasing: which parts of them are erased
course        which positions a subscription reads, and which reads a position next
ring          the slots of one stream and what is being filled into them
mailbox       which place of a live stream holds which sample
subscription  one trainer: where it is, what it wants, what it holds
supply        how batches get their samples, stored or pushed; how far apart trainers may be
claims        which subscription may claim another slot, and which one
tenants       whose turn it is for the workers' time, and what each owner has had
delivery      batches and answers for the trainers of one stream
ordering      the rows that are filled next, and by which worker; rows: as messages name them
digests       what was delivered in each epoch
stream        the delivery of one stream, its bad samples, the size of its orders, its outages
suspicion     bad samples, and which sample kills workers
fleet         workers, their orders, their restarts
state         the whole: one event, the time, a list of actions
links         worker hosts: what each may fill, and whether its rows can be trusted
shares        samples divided among worker hosts; windows: how many orders each may have
measure       where the workers' time and the trainers' waiting went; work: as a worker reports it
admission     why a trainer cannot have what it asks for
events, actions   the core's input, with the facts of its streams, and its decisions
"""
