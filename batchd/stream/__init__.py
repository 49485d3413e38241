"""One stream worked out: from its configuration to facts for the core and the workers.

plan        facts and problems that need no scan; the order and the weights of samples
served      with the index of its source: facts for core, workers and trainers; the fingerprint
fingerprints what a fingerprint is a digest of, and how two streams differ, for people
access      what its workers have to reach, of all that a process may
grouping    which samples share a batch, where sizes decide it, and these sizes
rings       the memory and the descriptors of the rings
cache_file  caches on disk; cache_memory: in shared memory
journal     what was in the batches of a live stream
"""
