"""Sources whose samples are rows of arrays in files: npy, npz and raw."""
