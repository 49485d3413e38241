"""The source ``webdataset``: samples in shards in tar format."""
