"""People's own functions: where their modules lie, and how they are called. Never imported in the daemon, only looked at.

find       where a module lies, a digest of its source, what is defined in it; imports nothing    daemon, CLI, workers
named      which functions a stream names                                                         daemon, CLI
given      what each is called with                                                               daemon, CLI, workers
signature  whether it can be called with that                                                     daemon, CLI, workers
load       imports                                                                                workers and helpers alone
told       calls, and says what went wrong in a few lines                                         the same
taken      what came back, checked against what was declared                                      the same
"""
