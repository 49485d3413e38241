"""Sources of samples: the daemon scans them and shares an index; workers read samples."""
