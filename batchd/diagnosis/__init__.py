"""Why a trainer waits: from two statuses of the daemon to one verdict for each trainer. In any process.

    status, a few seconds, status --readings--> the difference --verdicts--> kind, proof, remedy

Pure: it reads the values of ``batchd_wire.status``, so the command line and the page reach the same
verdict.
"""
