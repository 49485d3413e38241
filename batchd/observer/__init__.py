"""The observer: a process that answers HTTP, so that the daemon's loop never does.

    scraper, probe, browser -- HTTP --> observer -- AskStatus, as `batchd status` --> daemon
                                           +-- lifeline: ends with the daemon

server           HTTP, with limits
access           which requests are answered, and which see details
routes           the table of all paths, and the page
metrics          the table of all metrics, and their text for Prometheus
status_client    asks the daemon, and keeps its last answer
history          the last 15 minutes, for the page's plots
contact_sheets   pictures of batches, by `batchd peek`

Invariant: it asks the daemon at most ten questions a second, however many requests arrive, and
answers while the daemon does not.
"""
