"""Users' own functions: where their modules are, and how they are called. Never imported in the daemon, only looked at.

find        how a function is named; its module, a digest of its source, what is defined in it; imports nothing
signature   whether it can be called with the arguments that it will get, as far as its source tells
load        imports                                                       workers and helpers only
calls       calls; says what went wrong; checks what was returned         workers and helpers only
"""
