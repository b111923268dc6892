"""The position-wise feed-forward network of a Transformer layer."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers.arguments import Features
from attention_jax.layers.body import LinearSettings, settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.nonfinite import nan_propagating
from attention_jax.layers.recipes import BIAS_INIT, Initializer

Activation = Callable[[Array], Array]


@settings
class FeedForward(LinearSettings):
    """Position-wise feed-forward network, `y = W_2 f(W_1 x + b_1) + b_2`.

    Args:
        in_features: D, width of input and output.
        mlp_features: Width of the hidden layer.
        activation: f, an elementwise function.
        out_kernel_init: Initialiser of the second kernel; None is `kernel_init`.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 2.
    """

    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    activation: Activation = jax.nn.relu
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True

    _counts = ("in_features", "mlp_features")

    def _build(self, make: Construction) -> None:
        self.hidden = make.dense(self.in_features, self.mlp_features)
        self.out = make.dense(self.mlp_features, self.in_features, output=True)

    def __call__(self, x: Features) -> Float[Array, "*B T D"]:
        """Applies the network to every position.

        Args:
            x: `[*B, T, in_features]`.
        """
        return nan_propagating(lambda x: self.out(self.activation(self.hidden(x))), x)
