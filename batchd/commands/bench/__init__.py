"""Measures one stream on this machine, for ``batchd bench``. Runs in the user's shell.

    measure     a daemon and a trainer of its own, for each number of workers    -> Measurement
    trainer     the trainer: takes batches as fast as they come (a child)
    beside      a DataLoader in an interpreter of the user's                      -> Figures
    dataloader  its script, which imports nothing of batchd (a child)
    advice      what the figures mean, and what would help (pure)

Invariant: nothing is left of it, and no other daemon is disturbed.
"""
