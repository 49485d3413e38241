"""Where samples come from. Daemon (scans, shares the index) and workers (map the index, read samples).

kinds    what every kind of source can do, and where each is found: one module for each kind
scan     a source becomes an index
files    the index of samples that are files, or lie in files
reader   the columns of one sample, or the reason why there are none
walk     folders and what is in them, and which of it matches patterns
"""
