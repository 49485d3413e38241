"""The source ``tfrecord``: TensorFlow's examples."""
