"""Files of this machine, objects of servers, and what a scan keeps of them. Daemon, workers and CLI.

location        a path, or a URL where a path may be
access          how patient a process is with servers, and what identifies a file or an object
index           facts and flat arrays of a scanned source, in one sealed memfd that all workers map
survey          what a scan looked at, and its progress
index_cache     indexes of earlier scans, on disk
"""
