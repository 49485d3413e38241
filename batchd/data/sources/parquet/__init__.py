"""The source ``parquet``: rows of Parquet files."""
