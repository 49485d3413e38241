"""Users' own functions: where they are, and how they are called. The daemon never imports them.

find   how a function is named; its module, the digest of its source; whether it can be called with
       the arguments that it will get, as far as its source tells; imports nothing
load   imports and calls; says what failed; checks the result        workers and helpers only
"""
