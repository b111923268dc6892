"""What layers compute, written once for every flavour of Flax.

A *body* is a class without a flavour. Its annotated settings are the constructor's arguments; its
`_build` makes submodules and parameters through a `Construction`; its methods compute, in terms of
both. `attention_jax.nnx` and `attention_jax.linen` derive a module from each body and add what only
they know: how variables are made and kept, and where a random key comes from.
"""
