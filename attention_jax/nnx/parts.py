"""What the layers of a Transformer are assembled from."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import AnyMask, Features, check_activation
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, KERNEL_INIT, Initializer
from attention_jax._modules.settings import check_fields, check_settings
from attention_jax._modules.shield import shielded
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.mean import MeanAttention
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.places import AnyPositions
from attention_jax.nnx.randomness import Dropout, check_rngs
from attention_jax.nnx.scores import AnyScore

Activation = Callable[[Array], Array]


class FeedForward(nnx.Module):
    """The position-wise network, `y = W_2 f(W_1 x + b_1) + b_2`.

    Args:
        in_features: D, width of input and output.
        mlp_features: Width of the hidden layer.
        activation: f, an elementwise function.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels.
        out_kernel_init: That of the second kernel; None is `kernel_init`.
        bias_init: Initialiser of the biases.
        use_bias: Whether there are biases.
        rngs: A stream for the parameters.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 2.
    """

    def __init__(
        self,
        in_features: int,
        mlp_features: int,
        *,
        activation: Activation = jax.nn.relu,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = BIAS_INIT,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        check_rngs(type(self).__name__, rngs)
        check_count("in_features", in_features, 1)
        check_count("mlp_features", mlp_features, 1)
        self.activation = check_activation(activation)
        options = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        check_settings(out_kernel_init=out_kernel_init, **options)
        self.hidden = nnx.Linear(in_features, mlp_features, **options)
        options["kernel_init"] = kernel_init if out_kernel_init is None else out_kernel_init
        self.out = nnx.Linear(mlp_features, in_features, **options)

    def __call__(self, x: Features) -> Float[Array, "*B T D"]:
        """The network at every position.

        Args:
            x: `[*B, T, in_features]`.
        """
        return shielded(lambda x: self.out(self.activation(self.hidden(x))), x)


def check_options(owner: nnx.Module, rngs: Any, options: dict[str, Any], *more: str) -> None:
    """Checks what a module hands on to its layers, so that an error names the module itself.

    Args:
        owner: The module.
        rngs: Its streams.
        options: What it was given besides its own arguments.
        *more: What it takes besides the fields of `Parts`.

    Raises:
        TypeError: If one is not known, or `rngs` is something else.
    """
    name = type(owner).__name__
    check_rngs(name, rngs)
    own = {"num_heads", "in_features", "mlp_features", "rngs"}
    known = {field.name for field in dataclasses.fields(Parts)} - own | set(more)
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name} got an unexpected argument {option!r}{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the layers of a Transformer are assembled from, with the options all parts share."""

    num_heads: int
    in_features: int
    mlp_features: int
    activation: Activation = jax.nn.relu
    attention: Callable[..., MultiHeadAttention] = MultiHeadAttention
    dropout_rate: float | int = 0.0
    attention_dropout_rate: float | int = 0.0
    deterministic: Flag = None
    num_kv_heads: int | None = None
    normalize_qk: bool = False
    positions: AnyPositions = None
    value_features: int | None = None
    fused_qkv: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None
    rngs: nnx.Rngs

    def __post_init__(self) -> None:
        check_fields(self)

    def _take(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _linear(self) -> dict[str, Any]:
        inits = self._take("kernel_init", "bias_init", "use_bias")
        return {**inits, **self._take("dtype", "param_dtype", "precision", "rngs")}

    def self_attention(self, score: AnyScore, mask: AnyMask) -> MultiHeadAttention:
        """A layer's attention to itself, with its position scheme, under `mask` in every call."""
        own = self._take("positions", "fused_qkv")
        return self.scored_attention(score, mask, make=self.attention, **own)

    def scored_attention(
        self,
        score: AnyScore,
        mask: AnyMask = None,
        *,
        make: Callable[..., MultiHeadAttention] = MultiHeadAttention,
        **options: Any,
    ) -> MultiHeadAttention:
        """An attention with `score`, under `mask` in every call."""
        options |= {"score": score, "mask": mask, "dropout_rate": self.attention_dropout_rate}
        options |= self._take("num_kv_heads", "normalize_qk", "value_features", "deterministic")
        options |= self._take("implementation", "block_size", "out_kernel_init")
        # None is what every one of them is by default; a partial may have its own.
        given = {name: value for name, value in options.items() if value is not None}
        return make(self.num_heads, self.in_features, **given, **self._linear())

    def mean(self) -> MeanAttention:
        """What stands in attention's place to see what it is worth."""
        how = self._take("implementation", "block_size")
        return MeanAttention(self.in_features, **how, **self._linear())

    def feed_forward(self) -> FeedForward:
        """The network."""
        sizes = self._take("in_features", "mlp_features", "activation", "out_kernel_init")
        return FeedForward(**sizes, **self._linear())

    def layer_norm(self) -> LayerNorm:
        """A LayerNorm over the features."""
        return LayerNorm(self.in_features, **self._take("dtype", "param_dtype", "rngs"))

    def dropout(self, name: str) -> Dropout:
        """Dropout for the layer `name`."""
        flags = self._take("deterministic", "rngs")
        return Dropout(self.dropout_rate, name=name, **flags)
