"""The computation of layers, written once for every flavour of Flax.

A *body* is a class without a flavour. Its annotated settings are the constructor's arguments; its
`_build` makes submodules and parameters through a `Construction`; its methods compute, in terms of
both. `attention_jax.nnx` and `attention_jax.linen` derive a module from each body and define how
variables are created and stored, and how random keys are obtained.
"""
