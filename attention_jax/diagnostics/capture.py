"""One look at a model while it runs: what every attention in it does."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array
from attention_jax._core.record import Record
from attention_jax.attend import explain
from attention_jax.diagnostics import flavours, maps
from attention_jax.diagnostics.measure import Rows, run
from attention_jax.diagnostics.reading import Facts, Reading
from attention_jax.kernels import dense
from attention_jax.kernels.request import Request, Result
from attention_jax.scores.score import Sum
from attention_jax.scores.similarity import Dot, ScaledDot

_ROWS = (
    "entropy",
    "relative_entropy",
    "largest_weight",
    "first_share",
    "self_share",
    "ahead_share",
    "mean_key",
    "visible",
    "max_logit",
    "logit_range",
    "jacobian_norm",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Capture(Record, Mapping[str, Reading]):
    """What `capture` found: a mapping from each attention's path to its `Reading`; prints well.

    Attributes:
        output: what the model returned.
        readings: the readings by path, in the order the attentions ran.
        gradient_norms: for each attention, the norms of the loss's gradient by its parameters, by
            name; None without a loss.
        rollout: `[*B, T, T]` for each stack of self-attentions; None unless asked for.
        bad_gradients: parameters whose gradient is not finite; None without a loss.
    """

    output: Any
    readings: dict[str, Reading]
    gradient_norms: dict[str, dict[str, Any]] | None
    rollout: dict[str, Any] | None
    bad_gradients: dict[str, Any] | None

    def __getitem__(self, path: str) -> Reading:
        return self.readings[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readings)

    def __len__(self) -> int:
        return len(self.readings)

    def __repr__(self) -> str:
        """A table, a line for each attention: means over examples, heads and queries."""
        names = ["entropy", "of ln n", "largest", "first", "self", "range", "jacobian"]
        columns = _ROWS[0], _ROWS[1], _ROWS[2], _ROWS[3], _ROWS[4], "logit_range", "jacobian_norm"
        width = max(map(len, self), default=0)
        lines = [f"{'':{width}} heads " + " ".join(f"{name:>8}" for name in names)]
        for path, reading in self.items():
            least = [2 if name == "relative_entropy" else 1 for name in columns]
            each = [
                np.nanmean(x) if np.isfinite(x := reading.per_head(n, least_visible=k)).any() else 0
                for n, k in zip(columns, least, strict=True)
            ]
            shown = " ".join(f"{x:8.3f}" for x in each)
            lines.append(f"{path:{width}} {reading.num_heads:5} {shown}")
        return "\n".join(lines)


class _Call(NamedTuple):
    """All that is static about one `capture`; hashable where the model is."""

    flavour: str
    graph: Any
    method: str | None
    structure: Any
    static: tuple[Any, ...]
    patterns: tuple[str, ...]
    loss: Callable[[Any], Any] | None
    weights: bool
    similarity: bool
    rollout: bool


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
    """Runs a model and tells what every attention in it does, row by row.

    The model is compiled with its attention looked at while it is computed: entropy, the largest
    weight, shares, logits and the softmax's Jacobian cost a few sums more and O(T + S) memory. The
    model itself is not changed: what its modules write in the call is dropped.

    Args:
        model: an NNX module (ours, or Flax's with our `attention_fn`), a Linen module, or a
            function that calls `attend`.
        *inputs: what the model is called with.
        real: which tokens are real: a bool array `[*B, L]` for every attention with L keys, or a
            dict of such arrays by pattern, `{"encoder/*": ..., "*cross*": ...}`, the first that
            matches a path counting. Queries of self-attentions that are not real are left out of
            means.
        loss: `loss(output)`, a scalar: gradient norms are computed too, at a backward pass's cost.
        weights: whether readings carry their weights, of size T·S.
        similarity: whether heads are compared, at the cost of one more pass over the scores.
        rollout: whether what layers add up to is computed, of size T·T.
        variables: a Linen module's.
        method: the name of the method to call instead of the module itself.
        **options: keyword arguments of the call, such as `deterministic=True`.

    Returns:
        A `Capture`, which maps each attention's path to its `Reading`; scanned layers have paths
        with their number, `layers/self_attention[0]`.

    Raises:
        ValueError: no attention of ours ran; patterns that match nothing; what does not fit.
        TypeError: a model that cannot be called, a `real` that is not boolean.

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
    parts = flavours.take_apart(model, variables)
    candidates = {} if real is None else (real if isinstance(real, dict) else {"*": real})
    for pattern, array in candidates.items():
        if as_array("real", array).dtype != np.bool_:
            raise TypeError(f"real[{pattern!r}] must be boolean, got dtype {array.dtype}")
    if loss is not None and not jax.tree.leaves(parts.parameters):
        raise ValueError("loss asks for gradients by parameters, and the model has none")
    leaves, structure = jax.tree.flatten((inputs, options))
    arrays = [x if hasattr(x, "dtype") else None for x in leaves]
    static = tuple(None if hasattr(x, "dtype") else x for x in leaves)
    call = _Call(
        *parts[:2],
        method,
        structure,
        static,
        tuple(candidates),
        loss,
        weights,
        similarity,
        rollout,
    )
    given = parts.parameters, parts.rest, arrays, tuple(candidates.values())
    try:
        hash(call)
    except TypeError:  # compiled once for this call alone
        found = jax.jit(lambda *given: _capture(call, *given))(*given)
    else:
        found = _compiled(call, *given)
    output, readings, norms, bad = found
    if not readings:
        raise ValueError(
            "no attention of attention_jax ran in this model: build it from attention_jax's "
            "modules, give Flax's an attention_fn, or call attend"
        )
    ordered = _apart(dict(sorted(readings.items(), key=lambda item: item[1].facts.order)))
    for pattern in candidates:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in ordered):
            raise ValueError(f"real: {pattern!r} matches none of {', '.join(ordered)}")
    rolled = None
    if rollout:
        rolled = maps.rollout({path: x.mean_map for path, x in ordered.items()})
    return Capture(output, ordered, norms, rolled, bad)


def _apart(readings: dict[str, Reading]) -> dict[str, Reading]:
    """Readings of layers that were scanned come stacked; here they are `path[0]`, `path[1]`."""
    found = {}
    for path, reading in readings.items():
        stacked = reading.entropy.ndim - reading.facts.batch_axes - 2
        if not stacked:
            found[path] = reading
            continue
        layers = {
            f"{path}[{i}]": jax.tree.map(lambda x, i=i: x[i], reading)
            for i in range(reading.entropy.shape[0])
        }
        found |= _apart(layers)
    return found


def _capture(call: _Call, parameters: Any, rest: Any, arrays: Any, real: Any) -> tuple[Any, ...]:
    leaves = [s if a is None else a for a, s in zip(arrays, call.static, strict=True)]
    args, options = jax.tree.unflatten(call.structure, leaves)

    def model(parameters: Any) -> flavours.Model:
        return flavours.Model(call.flavour, call.graph, parameters, rest)

    watch = flavours.Watch(lambda *seen: _look(call, real, *seen))
    output, kept = flavours.run(model(parameters), watch, call.method, args, options)
    settled = {path: _settle(call, real, path, reading) for path, reading in kept.items()}
    # a model that is itself an attention has no path: its class is its name
    places = {path or reading.facts.kind: path for path, reading in settled.items()}
    readings = {name: settled[path] for name, path in places.items()}
    if call.loss is None:
        return output, readings, None, None

    def lost(parameters: Any) -> Array:
        output, _ = flavours.run(model(parameters), None, call.method, args, options)
        return call.loss(output)  # type: ignore[misc]

    gradients = flavours.parameters_by_path(model(parameters), jax.grad(lost)(parameters))
    return output, readings, gradient_norms(gradients, places), _bad(gradients)


_compiled = jax.jit(_capture, static_argnums=(0,))


def gradient_norms(
    gradients: Mapping[str, Array], places: Mapping[str, str]
) -> dict[str, dict[str, Array]]:
    """The norms of each attention's gradients by the names of its parts, and "all" of them."""
    found: dict[str, dict[str, Array]] = {}
    for path, place in places.items():
        start = f"{place.split('#')[0]}/" if place else ""
        squares: dict[str, Array] = {}
        for name, gradient in gradients.items():
            if name.startswith(start):
                part = name[len(start) :].split("/")[0]
                square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
                squares[part] = square + squares[part] if part in squares else square
        norms = {part: jnp.sqrt(square) for part, square in squares.items()}
        found[path] = {**norms, "all": jnp.sqrt(sum(squares.values(), start=jnp.float32(0)))}
    return found


def _bad(gradients: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.sum(~jnp.isfinite(x)) for name, x in gradients.items()}


def _look(
    call: _Call, real: tuple[Any, ...], request: Request, again: Any, kind: str, order: int
) -> tuple[Result, Any]:
    """One call of attention: its result and its reading, with a share for each `real` that fits."""
    layout = request.layout
    facts = _facts(request, kind, order)
    if 0 in (*layout.batch, layout.N, layout.T, layout.S):
        result = again(request)
        zeros = jnp.zeros((*layout.batch, layout.N, layout.T), jnp.float32)
        rows = Rows(*([zeros] * 13))._replace(
            real_share=zeros[..., None][..., :0], visible=zeros.astype(jnp.int32)
        )
        fitting: tuple[int, ...] = ()
    else:
        fitting = tuple(i for i, x in enumerate(real) if _fits(x, layout))
        result, rows = run(request, tuple(real[i] for i in fitting))
    rows = jax.lax.stop_gradient(rows)
    similarity = weights = mean_map = None
    if call.similarity and rows.lse.ndim > rows.entropy.ndim:
        similarity = maps.head_similarity(request, rows.lse, rows.visible)
    if call.weights or call.rollout:
        weights = dense.weights(request)
        mean_map = jnp.mean(weights, axis=-3) if call.rollout else None
    arrays = request.query, request.key, request.value, result.out
    reading = Reading(
        **{name: getattr(rows, name) for name in _ROWS},
        padding_share=None,
        out_norm=jnp.swapaxes(jnp.linalg.norm(result.out.astype(jnp.float32), axis=-1), -1, -2),
        largest=jnp.stack([_largest(x) for x in arrays]),
        bad=jnp.stack([jnp.sum(~jnp.isfinite(x).all(-1)) for x in arrays]),
        counted=None,
        similarity=similarity,
        weights=weights if call.weights else None,
        mean_map=mean_map,
        facts=facts,
    )
    return result, (reading, {str(i): rows.real_share[..., k] for k, i in enumerate(fitting)})


def _settle(call: _Call, real: tuple[Any, ...], path: str, kept: Any) -> Reading:
    """A reading once its path is known, and with it which tokens are real."""
    reading, shares = kept
    for i, pattern in enumerate(call.patterns):
        if str(i) in shares and fnmatch.fnmatchcase(path, pattern):
            share = shares[str(i)]
            seen = reading.visible > 0
            padding = jnp.where(seen, jnp.maximum(1 - share, 0), 0)
            counted = None
            if real[i].shape[-1] == share.shape[-1] and "cross" not in path:
                counted = jnp.asarray(real[i])[..., None, :]
                lead = (1,) * (share.ndim - counted.ndim)
                counted = jnp.broadcast_to(counted.reshape(*lead, *counted.shape), share.shape)
            return dataclasses.replace(reading, padding_share=padding, counted=counted)
    return reading


def _fits(real: Any, layout: Any) -> bool:
    batch = real.shape[:-1]
    tail = layout.batch[len(layout.batch) - len(batch) :]
    return (
        real.shape[-1] == layout.S
        and len(batch) <= len(layout.batch)
        and all(a in (1, b) for a, b in zip(batch, tail, strict=True))
    )


def _largest(x: Any) -> Array:
    x = jnp.asarray(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)


def _facts(request: Request, kind: str, order: int) -> Facts:
    score: Any = request.score
    inner, depth = score, request.layout.H
    while isinstance(inner, Sum):
        inner = inner.score
    scale = None
    if isinstance(inner, Dot):
        scale = 1.0
    elif isinstance(inner, ScaledDot) and (factor := inner.static_scale(depth)) is not None:
        scale = float(factor)
    plan = explain(
        *(
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in (request.query, request.key, request.value)
        ),
        score=score,
    )
    mask = None if request.mask is None else repr(request.mask)
    dtype = np.dtype(request.query.dtype).name
    axes = len(request.layout.batch)
    return Facts(kind, order, repr(score), mask, scale, depth, dtype, plan.implementation, axes)
