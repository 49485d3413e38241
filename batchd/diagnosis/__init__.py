"""Why a trainer waits: from two looks at the daemon's numbers to one verdict for each trainer. In no process of its own.

    status, a few seconds, status --readings--> what happened in between --verdicts--> kind, numbers, remedy

Pure: it reads the values of ``batchd_wire.status``, so the command line and the page come to the
same verdict.
"""
