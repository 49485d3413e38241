"""Files of this machine, objects of servers, and indexes of sources. Daemon, workers and CLI.

access          one ``Storage`` for a process: limits, connections, deadlines, and files for scans
objects         requests to servers; the only module that imports obstore
paths           files of this machine: whether they can be read, links, shards that stay open
patterns        patterns of file names, and whether a file matches
reader          the bytes of samples, for workers; ahead: those requested before they are needed
rows            rows of one local file at once
values          limits, and what tells whether a file or an object has changed
index           facts and flat arrays of a scanned source, in one sealed memfd that all workers map
survey          the files that a scan read, and its progress; compressed files
index_cache     indexes of earlier scans, on disk
"""
