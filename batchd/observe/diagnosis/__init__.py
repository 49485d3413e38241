"""Why a trainer waits: two statuses of the daemon become one verdict for each trainer.

    status, a few seconds, status --readings--> the difference --verdicts--> kind, proof, remedy

Pure: it reads the values of ``batchd_wire.status``, so the command line and the page reach the same
verdict.
"""
