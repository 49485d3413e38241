"""What a position of a stream is made of, after the run: `replay`, `seen`, `blame`, `card`, `diff`.

cards     a stream's fingerprint with its parts, the versions of what decodes, its configuration
batches   a stream without a daemon: its index, its plan, its workers; the batch of a position,
          made again, and how each of its rows was made
journal   the same of a live stream, by what was in its batches
seen      the positions of a sample, by the inverse of the plan
differ    where the batches of two runs begin to differ, and why
blame     which groups of samples stand out in losses by position: ``losses``, ``suspects``

All but the workers run in the process that asks: a command, or a user's program. The processes that
make rows are those that the daemon has.
"""
