"""One stream worked out: from its configuration to facts for the core and the workers.

plan          what a configuration and its index give: plan, layout, recipe
served        a stream as the daemon serves it, and its fingerprint
grouping      streams that share a scan or a cache; measuring: lengths of samples; weights: of a mix
rings         how much memory each ring has
cache_file    a cache on disk; cache_memory: in shared memory; journal: what was delivered
"""
