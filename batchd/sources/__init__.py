"""Where samples come from. Daemon (scans, shares the index) and workers (map the index, read files); standard library and numpy.

index   paths and labels as flat arrays, in one sealed memfd that everybody maps
scan    a folder or a list file becomes an index
reader  the bytes of one sample, or the reason why there are none
"""
