"""People's own functions: where their modules lie, and how they are called. Never imported in the daemon, only looked at.

find   where a module lies, a digest of its source, and what is defined in it, all without importing   daemon, CLI, workers
named  which functions a stream names                                                                      daemon, CLI
load   imports                                                                                         workers and helpers alone
told   calls, and says what went wrong in a few lines                                                  the same
taken  what came back, checked against what was declared                                               the same
"""
