"""Runs a model once and records every call of attention in it."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array
from attention_jax._core.compiled import compiled
from attention_jax._core.pytrees import Record, pytree
from attention_jax.diagnostics import application, maps
from attention_jax.diagnostics.record import AttentionRecord
from attention_jax.diagnostics.recording import Settings, complete, record_call

# the columns of a printed capture
_COLUMNS = {
    "entropy": "entropy",
    "of ln n": "relative_entropy",
    "largest": "largest_weight",
    "first": "first_share",
    "self": "self_share",
    "range": "logit_range",
    "jacobian": "jacobian_norm",
}


@pytree
class Capture(Record, Mapping[str, AttentionRecord]):
    """The result of `capture`: a mapping from each attention's path to its `AttentionRecord`.

    Attributes:
        output: the model's output.
        records: the records by path, in order of execution.
        gradient_norms: for each attention, norms of the loss's gradient with respect to its
            parameters, by name; None without a loss.
        rollout: `[*B, T, T]` for each stack of self-attentions; None unless requested.
        bad_gradients: the number of non-finite entries of each parameter's gradient; None without
            a loss.
    """

    output: Any
    records: dict[str, AttentionRecord]
    gradient_norms: dict[str, dict[str, Any]] | None
    rollout: dict[str, Any] | None
    bad_gradients: dict[str, Any] | None

    def __getitem__(self, path: str) -> AttentionRecord:
        return self.records[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        """A table with a line for each attention: means over examples, heads and queries."""
        width = max(map(len, self), default=0)
        lines = [f"{'':{width}} heads " + " ".join(f"{name:>8}" for name in _COLUMNS)]
        for path, record in self.items():
            shown = []
            for name in _COLUMNS.values():
                least = 2 if name == "relative_entropy" else 1
                x = record.per_head(name, least_visible=least)
                shown.append(f"{np.nanmean(x) if np.isfinite(x).any() else 0:8.3f}")
            lines.append(f"{path:{width}} {record.num_heads:5} {' '.join(shown)}")
        return "\n".join(lines)


class _Static(NamedTuple):
    """The static part of a capture; hashable if the model is."""

    application: Any
    settings: Settings
    loss: Callable[[Any], Any] | None


def capture(
    model: Any,
    *inputs: Any,
    real: Any = None,
    loss: Callable[[Any], Any] | None = None,
    weights: bool = False,
    similarity: bool = False,
    rollout: bool = False,
    variables: Any = None,
    method: str | None = None,
    **options: Any,
) -> Capture:
    """Runs a model and records row statistics of every call of attention in it.

    The statistics (entropy, largest weight, shares, logits, the norm of the softmax Jacobian) are
    computed together with the output, in O(T + S) memory. The model is not changed: state that its
    modules write is discarded. Calls of the sub-quadratic functions are not recorded.

    Args:
        model: an NNX module (ours, or Flax's with our `attention_fn`), a Linen module, bound or
            with `variables`, or a function that calls either or `attend`. Attention is recorded
            inside jit, remat, scan, vmap and derivatives.
        *inputs: positional arguments of the model.
        real: which tokens are not padding: a bool array `[*B, S]` for every attention with S keys,
            or a dict of such arrays by path pattern, `{"encoder/*": ..., "*cross*": ...}`; the
            first match counts. Padding queries of self-attentions are left out of means.
        loss: `loss(output)`, a scalar: adds gradient norms, at the cost of a backward pass.
        weights: whether records include the weights, of size T·S.
        similarity: whether to compare heads, at the cost of another pass over the scores.
        rollout: whether to compute the attention rollout, of size T·T.
        variables: the variables of a Linen module that is not bound.
        method: name of the method to call, by default `__call__`.
        **options: keyword arguments of the model, such as `deterministic=True`.

    Returns:
        A `Capture`, which maps the path of each attention to its `AttentionRecord`; scanned layers
        have indexed paths, `layers/self_attention[0]`.

    Raises:
        ValueError: no attention was recorded, a pattern without a match, an array that does not
            fit.
        NotImplementedError: attention inside a while loop, or in one branch of a `cond` only.
        TypeError: a model that is not callable, a `real` that is not boolean.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoder
        >>> model = TransformerEncoder(2, 4, 16, 32, rngs=nnx.Rngs(0))
        >>> found = aj.diagnostics.capture(model, jnp.ones((3, 7, 16)))
        >>> list(found)
        ['layers/0/self_attention', 'layers/1/self_attention']
        >>> found["layers/0/self_attention"].entropy.shape
        (3, 4, 7)

    References:
        Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy
        Collapse", arXiv:2303.06296 (entropy).
        Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks",
        arXiv:2309.17453 (share on the first token).
    """
    applied = application.prepare(model, variables, method, inputs, options)
    candidates = {} if real is None else (real if isinstance(real, dict) else {"*": real})
    for pattern, array in candidates.items():
        if as_array("real", array).dtype != np.bool_:
            raise TypeError(f"real[{pattern!r}] must be boolean, got dtype {array.dtype}")
    if loss is not None and not jax.tree.leaves(applied.parameters):
        raise ValueError("loss needs gradients with respect to parameters, and the model has none")
    arrays, parts = application.split(applied)
    static = _Static(parts, Settings(tuple(candidates), weights, similarity, rollout), loss)
    given = arrays, tuple(candidates.values())
    output, records, norms, bad = _compiled(static, *given)
    if not records:
        raise ValueError(
            "no attention of attention_jax ran in this model, apart from the sub-quadratic "
            "functions: build it from attention_jax's modules, pass attention_fn to Flax's, or "
            "call attend"
        )
    ordered = _unstack(dict(sorted(records.items(), key=lambda item: item[1].facts.order)))
    for pattern, array in candidates.items():
        _check_real(pattern, array, ordered)
    rolled = None
    if rollout:
        rolled = maps.rollout({path: x.mean_map for path, x in ordered.items()})
    return Capture(output, ordered, norms, rolled, bad)


def _check_real(pattern: str, real: Any, records: Mapping[str, AttentionRecord]) -> None:
    """Raises unless an array of real tokens fits one of the attentions that it is for."""
    own = {path: x for path, x in records.items() if fnmatch.fnmatchcase(path, pattern)}
    if not own:
        raise ValueError(f"real: {pattern!r} matches none of {', '.join(records)}")
    if all(x.padding_share is None and x.entropy.size for x in own.values()):
        shapes = {f"{path} has {[*x.entropy.shape[:-2], x.facts.keys]}" for path, x in own.items()}
        raise ValueError(
            f"real[{pattern!r}] {list(real.shape)} must be [*B, S] of an attention that the "
            f"pattern matches: {', '.join(sorted(shapes))}"
        )


def _unstack(records: dict[str, AttentionRecord]) -> dict[str, AttentionRecord]:
    """Splits the stacked records of scanned layers into `path[0]`, `path[1]`, ..."""
    found = {}
    for path, record in records.items():
        if record.entropy.ndim == record.facts.batch_axes + 2:
            found[path] = record
            continue
        layers = {
            f"{path}[{i}]": jax.tree.map(lambda x, i=i: x[i], record)
            for i in range(record.entropy.shape[0])
        }
        found |= _unstack(layers)
    return found


def _capture(static: _Static, arrays: list[Any], real: tuple[Any, ...]) -> tuple[Any, ...]:
    applied = application.join(arrays, static.application)
    output, found = applied.run(functools.partial(record_call, static.settings, real))
    parameters = applied.by_path(applied.parameters)
    records = {
        name: dataclasses.replace(
            complete(static.settings, real, name, order, x),
            out_weight=_out_weight(parameters, x.path),
        )
        for order, (name, x) in enumerate(found.items())
    }
    if static.loss is None:
        return output, records, None, None

    def loss(parameters: Any) -> Array:
        output, _ = applied._replace(parameters=parameters).run()
        return static.loss(output)  # type: ignore[misc]

    gradients = applied.by_path(jax.grad(loss)(applied.parameters))
    bad = {name: jnp.sum(~jnp.isfinite(x)) for name, x in gradients.items()}
    norms = {name: _gradient_norms(gradients, x.path) for name, x in found.items()}
    return output, records, norms, bad


_compiled = compiled(_capture, static=(0,))


def _out_weight(parameters: Mapping[str, Array], path: str) -> Array | None:
    """Norms of the heads' slices of the output kernel `[*layers, N, V, D]`."""
    kernel = parameters.get(f"{path}/out/kernel".lstrip("/"))
    if kernel is None or kernel.ndim < 3:
        return None
    return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=(-2, -1)))


def _gradient_norms(gradients: Mapping[str, Array], path: str) -> dict[str, Array]:
    """Gradient norms of an attention's parameters, by the first part of their name, and "all"."""
    start = f"{path}/" if path else ""
    squares: dict[str, Array] = {}
    for name, gradient in gradients.items():
        if name.startswith(start):
            part = name[len(start) :].split("/")[0]
            square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
            squares[part] = square + squares[part] if part in squares else square
    squares["all"] = sum(squares.values(), start=jnp.float32(0))
    return {part: jnp.sqrt(square) for part, square in squares.items()}
