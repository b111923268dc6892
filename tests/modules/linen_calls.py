"""A Linen module, compiled as a whole: far quicker than one compilation for each operation."""

import jax


def init(layer, *inputs, key=0, **options):
    """The module's variables."""
    run = jax.jit(lambda key, inputs: layer.init(key, *inputs, **options))
    return run(jax.random.key(key), inputs)


def apply(layer, variables, *inputs, method="__call__", key=None, **options):
    """What the module answers; `key` is that of the stream "dropout"."""

    def run(variables, inputs):
        rngs = {} if key is None else {"dropout": jax.random.key(key)}
        named = getattr(layer, method)
        return layer.apply(variables, *inputs, method=named, rngs=rngs, **options)

    return jax.jit(run)(variables, inputs)
