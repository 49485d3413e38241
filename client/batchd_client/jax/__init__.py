"""batchd in JAX: dicts of ``jax.Array``, on their way to the device before the loop wants them. Runs in the trainer.

    from batchd_client.jax import BatchdLoader

    loader = BatchdLoader("photos", sharding=sharding)      # rank and world size: JAX's processes
    for epoch in range(90):
        for batch in loader:
            state = step(state, batch["image"], batch["label"])

``batches`` is the same over a stream that the program has opened itself.
"""

try:
    import jax as _jax  # noqa: F401  asked for first, so that a missing one is told with what to do
except ImportError as _error:
    raise ImportError(
        "batchd_client.jax needs JAX: pip install jax (https://docs.jax.dev/en/latest/installation.html)"
    ) from _error

from batchd_client.jax.loader import BatchdLoader, Batches, batches

__all__ = ["BatchdLoader", "Batches", "batches"]
