"""The observer: a process that answers HTTP, so that the daemon's loop never does.

    scraper, probe, browser -- HTTP --> observer -- AskStatus, as `batchd status` --> daemon
                                           +-- lifeline: ends with the daemon

Invariant: it asks the daemon at most ten questions a second, however many requests arrive, and
answers while the daemon does not.
"""
