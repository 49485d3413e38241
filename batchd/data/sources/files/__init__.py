"""Sources whose samples are files: folder, list and glob."""
