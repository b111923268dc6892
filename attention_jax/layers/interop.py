"""The function that Flax's attention modules take as `attention_fn`.

Flax's `MultiHeadAttention` projects, caches and applies dropout, and calls a function for the
attention. This file converts its arguments to a call of `attend`; the flavours add the arguments
that only one of them passes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import masks
from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import as_array, check_floating, check_inputs, check_pairs
from attention_jax._core.numerics import arange, is_concrete, promote, widen
from attention_jax._core.term import Term
from attention_jax.attend import attention_weights, execute, make_request
from attention_jax.layers import docstrings, recipes
from attention_jax.layers.arguments import (
    AnyBias,
    AnyMask,
    as_mask,
    cast,
    check_implementation,
    combine,
)
from attention_jax.layers.caches import by_position, counted
from attention_jax.layers.flavours import for_flavour
from attention_jax.masks import Mask
from attention_jax.masks.block_map import block_pair
from attention_jax.positions.array_bias import ArrayBias
from attention_jax.scores import Score
from attention_jax.scores.score import Sum


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionFn:
    """The callable that `attention_fn` returns; two with equal options are equal.

    It is not a pytree, so that a module may hold it as a plain attribute: its arrays are constants.
    """

    score: Score | None
    mask: Mask | None
    bias: Term | None
    implementation: str | tuple[str, ...] | None
    block_size: int | tuple[int, int] | None

    def __repr__(self) -> str:
        """The call that made it."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
        return f"attention_fn({shown})"

    def _run(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        bias: AnyBias,
        mask: Any,
        broadcast_dropout: bool,
        dropout_rng: Any,
        dropout_rate: float | int,
        deterministic: bool,
        dtype: Any,
        precision: Any,
        is_causal: bool,
        force_fp32_for_softmax: bool,
        sow: Callable[[Array], Any] | None,
    ) -> Array:
        """Calls `attend`.

        Args:
            query: `[*B, T, N, H]`.
            key: `[*B, S, K, H]`.
            value: `[*B, S, K, V]`.
            bias: Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.
            mask: A mask object or an array `[*#B, #N, #T, #S]`, boolean or of 0 and 1.
            broadcast_dropout: One dropout mask `[T, S]` for all batch entries and heads.
            dropout_rng: A PRNG key, required with a positive rate unless `deterministic`.
            dropout_rate: Probability that a weight is dropped, in [0, 1).
            deterministic: Whether to disable dropout.
            dtype: Dtype of inputs and output; None: the inputs' common dtype.
            precision: As in `jax.lax.Precision`.
            is_causal: Whether query t attends to keys 0..t only, besides the mask.
            force_fp32_for_softmax: Whether sown weights are at least float32 instead of the common
                dtype. The softmax always is.
            sow: Receives the weights, before dropout; None: weights are not computed.
        """
        arrays = {"query": query, "key": key, "value": value}
        for name, x in arrays.items():
            check_floating(name, as_array(name, x))
        dtype = promote(*(x.dtype for x in arrays.values())) if dtype is None else dtype
        query, key, value = (cast(x, dtype) for x in arrays.values())
        layout = check_inputs(query, key, value)
        given, valid = boolean(mask)
        if given is not None and not isinstance(given, Mask):
            check_pairs("mask", given, layout)
        position = _step_position(given, layout)
        causal = masks.causal() if is_causal else None
        score, settled = self.score, self.mask
        if position is not None:
            settled = by_position(settled)
            score = None if score is None else counted(score, position[..., 0] + 1)
        call_options = {
            "score": score,
            "mask": combine(settled, causal, given),
            "bias": _total(self.bias, bias),
            "query_positions": position,
            "precision": _one_precision(precision),
        }
        if sow is not None:
            wide = widen(query) if force_fp32_for_softmax else query
            sow(_nan_unless(attention_weights(wide, key, **call_options), valid))
        dropout = {}
        if not deterministic and dropout_rate:
            if dropout_rng is None:
                raise ValueError(
                    f"dropout_rate {dropout_rate} with deterministic=False needs a dropout_rng"
                )
            dropout = {
                "dropout_rate": dropout_rate,
                "dropout_key": dropout_rng,
                "shared_dropout": broadcast_dropout,
            }
        request = make_request(
            query, key, value, block_size=self.block_size, **call_options, **dropout
        )
        return _nan_unless(execute(request, self.implementation).out, valid)


Made = TypeVar("Made")
P = ParamSpec("P")


def described(call: Callable[P, Made]) -> Callable[P, Made]:
    """A flavour's `AttentionFn.__call__`, with its docstring completed."""
    known = docstrings.arguments(AttentionFn._run.__doc__)
    names = inspect.signature(call).parameters
    call.__doc__ = docstrings.completed(call.__doc__, names, known)
    return call


def attention_fn(
    kind: Callable[..., AttentionFn],
    score: Any = None,
    mask: AnyMask = None,
    bias: AnyBias = None,
    implementation: Any = None,
    block_size: int | tuple[int, int] | None = None,
) -> AttentionFn:
    """This library's attention as the `attention_fn` of Flax's modules.

        out_t = Σ_s softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) ) · v_s

    Flax's module keeps its projections, parameters, cache and dropout rules; every mask, bias, flag
    and key that it passes is used. Masks made by Flax's helpers, which hold 0.0 and 1.0, become
    boolean; other numbers are an error, or NaN in the output if the mask is traced. The output of a
    query without visible keys is 0.

    In a step of Flax's cached decoding (one query, and the mask of the written keys) the query has
    the position of the last visible key. `is_causal`, masks and biases use that position,
    `causal(align="end")` is `causal()`, and `log_length` counts the keys up to it: the step equals
    the last row of a full pass over the tokens so far.

    Args:
        score: A score object, or a name or recipe without parameters ("dot", "scaled_dot"); None is
            the scaled dot product. Arrays in it are constants: no optimizer updates them. For a
            trainable score use this library's `MultiHeadAttention`.
        mask: A mask object or boolean array for every call, combined with the call's mask.
        bias: A bias object or array added in every call, in addition to the call's bias.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Returns:
        A callable; two with equal options are equal, so that they share compiled code.

    Raises:
        TypeError: If an option is of the wrong kind, such as a mask that is not boolean, or Flax
            was given `attention_fn` itself instead of its result.
        ValueError: If the score has parameters to initialise, or there is no such kernel.
    """
    if score is not None and not isinstance(score, Score):
        recipe = recipes.recipe(score)
        names = recipe.parameters(recipes.Sizes(1, 1, 1))
        if names:
            raise ValueError(
                f"score {recipe!r} has parameters to make ({', '.join(names)}), and a function "
                "owns none: give a score object with its arrays, which are then constants, or use "
                "this library's MultiHeadAttention, which trains them"
            )
        score = recipe.build({})
    if bias is not None and not isinstance(bias, Term):
        check_floating("bias", as_array("bias", bias))
        bias = ArrayBias(bias)
    check_implementation(implementation)
    if implementation is not None and not isinstance(implementation, str):
        implementation = tuple(implementation)
    block_size = None if block_size is None else block_pair(block_size)
    return kind(score, as_mask(mask), bias, implementation, block_size)


def factory(kind: Callable[..., AttentionFn], extra: str) -> Callable[..., AttentionFn]:
    """A flavour's version of `attention_fn`.

    It raises a specific error if it was passed to Flax uncalled: Flax then calls the factory with
    queries, keys and values.
    """
    make = for_flavour(attention_fn, lambda: kind, extra)

    @functools.wraps(make)
    def checked(*args: Any, **options: Any) -> AttentionFn:
        if args and isinstance(args[0], jax.Array | np.ndarray):
            raise TypeError(
                "attention_fn makes the function that attends, and was given arrays itself: write "
                "attention_fn=attention_fn(), with the call"
            )
        return make(*args, **options)

    checked.__module__ = kind.__module__
    return checked


def boolean(mask: Any) -> tuple[Any, Array | None]:
    """Converts a mask of Flax's helpers, which write True and False as 1.0 and 0.0.

    Args:
        mask: A mask object, a boolean array, or an array of numbers that are all 0 or 1; or None.

    Returns:
        A mask object or boolean array, and, under tracing, whether the numbers are 0 and 1.

    Raises:
        TypeError: If it is not an array.
        ValueError: If a concrete number is neither 0 nor 1.
    """
    if mask is None or isinstance(mask, Mask):
        return mask, None
    if as_array("mask", mask).dtype == np.bool_:
        return mask, None
    if not is_concrete(mask):
        visible = mask != 0
        return visible, jnp.all(~visible | (mask == 1))
    values = np.asarray(mask)
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        raise ValueError(
            f"mask has dtype {values.dtype.name} and holds {wrong[0]}: numbers in a mask must be 0 "
            "or 1, as Flax's helpers make them; what is added to the scores is a bias"
        )
    return values != 0, None


def _nan_unless(x: Array, valid: Array | None) -> Array:
    """`x`, or NaN if the mask is not valid."""
    return x if valid is None else jnp.where(valid, x, jnp.nan)


def _step_position(mask: Any, layout: Layout) -> Array | None:
    """The query's position in a step of Flax's cached decoding: that of the last visible key.

    Such a step has one query, several keys and a mask of the written ones, but no positions. Masks
    and biases by position and scores that count keys need one. None for every other call.
    """
    if mask is None or isinstance(mask, Mask) or layout.T != 1 or layout.S < 2:
        return None
    visible = jnp.broadcast_to(jnp.asarray(mask), (*mask.shape[:-1], layout.S))
    visible = visible if visible.ndim < 2 else visible[..., 0, :]
    batch = () if visible.ndim < 3 else layout.batch
    visible = visible if visible.ndim < 2 else visible.any(axis=-2)
    index = arange(layout.S).reshape((1,) * (visible.ndim - 1) + (layout.S,))
    last = jnp.max(jnp.where(visible, index, 0), axis=-1)[..., None]
    return jnp.broadcast_to(last, (*batch, 1))


def _total(settled: Term | None, called: AnyBias) -> Any:
    """The sum of the biases of the options and of the call."""
    if settled is None or called is None:
        return called if settled is None else settled
    return Sum(settled, called if isinstance(called, Term) else ArrayBias(as_array("bias", called)))


def _one_precision(precision: Any) -> Any:
    """Converts Flax's pair of precisions, one for each operand, to one for both."""
    if not isinstance(precision, tuple):
        return precision
    if len(set(precision)) != 1:
        raise NotImplementedError(f"precision {precision}: the two operands must have the same")
    return precision[0]
