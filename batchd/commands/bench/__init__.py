"""Measures one stream on this machine, for ``batchd bench``. Runs in the user's shell.

    measure     a daemon and a trainer of its own, for each number of workers    -> Measured
    trainer     the trainer: takes batches as fast as they come (a child)
    dataloader  the same samples and steps in a torch DataLoader (a child)       -> Measured
    advice      what the figures mean, and what would help (pure)

Invariant: nothing is left of it, and no other daemon is disturbed.
"""
