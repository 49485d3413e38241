"""Why a trainer waits: from two looks at the daemon's numbers to one verdict for each trainer. In no process of its own.

    status, a few seconds, status --readings--> what happened in between --verdicts--> kind, numbers, remedy

Pure: the numbers come in as ``batchd status --json`` prints them, so the command line and the page come to the same verdict.
"""
