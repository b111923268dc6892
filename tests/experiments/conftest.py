"""What the tests of the experiments share."""

import jax
import pytest


@pytest.fixture
def as_users_run():
    """JAX's own rules for dtypes and ranks: optax needs them; the library's tests are stricter."""
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    # Not the context managers: they hold for one thread, and experiments compile in several.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before[0])
    jax.config.update("jax_numpy_rank_promotion", before[1])
