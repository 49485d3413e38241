"""From the values of a source to one row of a batch; README.md says what each module is for.

Workers run all of it; the daemon the effects.
"""
