"""Files of this machine, objects of servers, and what a scan keeps of them. Daemon, workers and CLI.

location        a path, or a URL where a path may be
access          one ``Storage`` for a process: limits, connections and deadlines, and the interface to both kinds of files
local_files     the files of this machine, for scans and checks
remote_files    the objects of servers, for the same
reader          the bytes of samples, for workers
values          limits, and what tells whether a file or an object has changed
index           facts and flat arrays of a scanned source, in one sealed memfd that all workers map
survey          what a scan looked at, and its progress
index_cache     indexes of earlier scans, on disk
"""
