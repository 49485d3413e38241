"""Users' own functions: where they are, and how they are called. The daemon never imports them.

find        how a function is named; its module, the digest of its source; imports nothing
signature   whether it can be called with the arguments that it will get, as far as its source tells
load        imports                                                       workers and helpers only
calls       calls; says what went wrong; checks what was returned         workers and helpers only
"""
