"""From features to heads and back: the projections around multi-head attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import check_width
from attention_jax._modules.fused import fused_product, split_parts
from attention_jax._modules.shield import calm, loud, shielded
from attention_jax.nnx.caching import CachedAttention
from attention_jax.nnx.norm import LayerNorm

_CALL = nnx.LinearGeneral.__call__  # what observes or changes calls sets another one on the class


class ProjectedAttention(CachedAttention):
    """A cached attention whose queries, keys and values are linear in its inputs."""

    num_heads: int
    in_features: int
    in_kv_features: int
    fused_qkv: bool
    query: nnx.LinearGeneral
    key: nnx.LinearGeneral
    value: nnx.LinearGeneral
    query_ln: LayerNorm | None
    key_ln: LayerNorm | None

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array]:
        """Query, key and value, the first two normalised and turned as the layer has it.

        Queries are calm; `answered` gives back what is not finite.
        """
        self._check(inputs_q, inputs_k, inputs_v)
        assert self.positions is not None  # a layer with projections has a scheme, if an empty one
        if self.fused_qkv and inputs_q is inputs_k is inputs_v and self._may_fuse():
            query, key, value = self._fused(inputs_q)
        else:
            query = calm(self._to_query, inputs_q)
            key, value = shielded(self._to_key, inputs_k), shielded(self.value, inputs_v)
        return self.positions.turn(query, query_at), self.positions.turn(key, key_at), value

    def _project_query(self, inputs_q: Any, at: Any) -> Array:
        check_width("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]")
        assert self.positions is not None  # as above
        return self.positions.turn(calm(self._to_query, inputs_q), at)

    def _project_memory(self, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        inputs_v = inputs_k if inputs_v is None else inputs_v
        self._check(None, inputs_k, inputs_v)
        assert self.positions is not None  # as above
        key = self.positions.turn(shielded(self._to_key, inputs_k), None)
        return key, shielded(self.value, inputs_v)

    def _project_out(self, out: Array) -> Array:
        return self.out(out)

    def _check(self, inputs_q: Any, inputs_k: Any, inputs_v: Any) -> None:
        if inputs_q is not None:
            check_width("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]")
        for name, x in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            check_width(name, x, self.in_kv_features, "[*B, S, in_kv_features]")

    def _to_query(self, x: Array) -> Array:
        return self.query(x) if self.query_ln is None else self.query_ln(self.query(x))

    def _to_key(self, x: Array) -> Array:
        return self.key(x) if self.key_ln is None else self.key_ln(self.key(x))

    def _may_fuse(self) -> bool:
        """Whether the projections are linear as they were made, so that a product is all of them.

        One that was replaced, derived or observed, as by `flax.nnx.capture`, is called instead.
        """
        layers: tuple[Any, ...] = (self.query, self.key, self.value)
        return all(type(layer) is nnx.LinearGeneral for layer in layers) and all(
            type(layer).__call__ is _CALL
            and layer.axis == (-1,)
            and not layer.batch_axis
            and layer.dot_general in (None, jax.lax.dot_general)
            and layer.dot_general_cls is None
            and layer.preferred_element_type is None
            and layer.promote_dtype is promote_dtype
            and layer.dtype == self.dtype
            and layer.precision == self.precision
            and (layer.bias is None) == (self.query.bias is None)
            and isinstance(layer.kernel[...], jax.Array)
            and jnp.issubdtype(layer.kernel[...].dtype, jnp.floating)
            for layer in layers
        )

    def _fused(self, x: Any) -> tuple[Array, Array, Array]:
        """All three in one matrix product with their kernels side by side."""
        layers = (self.query, self.key, self.value)
        kernels = [layer.kernel[...] for layer in layers]
        biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
        how = {"dtype": self.dtype, "precision": self.precision}
        joined = calm(lambda x: fused_product(x, kernels, biases, **how), x)
        query, key, value = split_parts(joined, [kernel.shape[1:] for kernel in kernels])
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, loud(key, x), loud(value, x)
