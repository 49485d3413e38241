"""The observer: a process that answers HTTP for the daemon, so that the daemon's loop never does.

    scraper, probe, browser -- HTTP --> observer -- AskStatus, as `batchd status` --> daemon
                                           +-- lifeline: ends with the daemon

inquiry          asks the daemon, and keeps its last answer
metrics          the table of all metrics; ``scopes`` are where in the status their values are
exposition       the table and an answer, as Prometheus reads them
routes           the table of all paths
names            what this machine is called
ends             who made the other end of a connection
visitors         who may see what
server           HTTP, with limits

Invariant: it asks the daemon ten questions a second at most, whatever comes in here, and answers
while the daemon does not.
"""
