"""Worker hosts on a Ray cluster: their number, the actor of each, and the Ray driver."""
