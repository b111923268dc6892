"""From features to heads and back: the projections around multi-head attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import check_width
from attention_jax._modules.shield import calm, loud, shielded
from attention_jax.nnx.caching import CachedAttention
from attention_jax.nnx.norm import LayerNorm


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
        if self.fused_qkv and inputs_q is inputs_k is inputs_v:
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

    def _fused(self, x: Any) -> tuple[Array, Array, Array]:
        """All three in one matrix product with their kernels side by side."""
        layers = (self.query, self.key, self.value)
        widths = [layer.kernel.shape[1:] for layer in layers]
        kernel = jnp.concatenate(
            [layer.kernel[...].reshape(self.in_features, -1) for layer in layers], axis=1
        )
        biases = [layer.bias[...].reshape(-1) for layer in layers if layer.bias is not None]
        bias = jnp.concatenate(biases) if biases else None

        def product(x: Array) -> Array:
            inputs, weights, shift = promote_dtype((x, kernel, bias), dtype=self.dtype)
            dims = (((inputs.ndim - 1,), (0,)), ((), ()))
            y = jax.lax.dot_general(inputs, weights, dims, precision=self.precision)
            return y if shift is None else y + shift.reshape((1,) * (y.ndim - 1) + (-1,))

        joined, start, parts = calm(product, x), 0, []
        for heads, depth in widths:
            part = joined[..., start : start + heads * depth]
            parts.append(part.reshape(*part.shape[:-1], heads, depth))
            start += heads * depth
        query, key, value = parts
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, loud(key, x), loud(value, x)
