"""One module in either flavour, with the same parameters and one way to call it."""

from flax import nnx

from attention_jax import linen
from attention_jax import nnx as modules


class Made:
    """A module of one flavour, made by `make(library, **options)`.

    Attributes:
        library: `attention_jax.nnx` or `attention_jax.linen`.
        model: The module.
        given: What functions of a model take first: the model, in Linen with its variables.
    """

    def __init__(self, flavour, make, change=None, seed=0):
        twin = nnx.jit(lambda: make(modules, rngs=nnx.Rngs(seed)))()
        if change is not None:
            change(twin)
        self.given: tuple
        self.library, self.model, self.given = modules, twin, (twin,)
        if flavour.name == "linen":
            self.library, self.model = linen, make(linen)
            self.given = (self.model, linen.from_nnx(twin))

    def __call__(self, *arrays, method="__call__", **options):
        if self.library is modules:
            return getattr(self.model, method)(*arrays, **options)
        return self.model.apply(self.given[1], *arrays, method=method, **options)

    def decode(self, name, *arrays, **options):
        """`greedy_decode` and its like."""
        return getattr(self.library, name)(*self.given, *arrays, **options)
