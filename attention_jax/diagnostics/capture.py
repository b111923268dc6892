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
from attention_jax.diagnostics import flavours, maps
from attention_jax.diagnostics.look import ROWS, Wanted, look, settle
from attention_jax.diagnostics.reading import Reading


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
        columns = ROWS[0], ROWS[1], ROWS[2], ROWS[3], ROWS[4], "logit_range", "jacobian_norm"
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
    wanted: Wanted
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
    """Runs a model and tells what every attention in it does, row by row.

    The model is compiled with its attention looked at while it is computed: entropy, the largest
    weight, shares, logits and the softmax's Jacobian cost a few sums more and O(T + S) memory. The
    model itself is not changed: what its modules write in the call is dropped. Attention of the
    sub-quadratic families has no such rows, and is passed over.

    Args:
        model: an NNX module (ours, or Flax's with our `attention_fn`), a Linen module, bound or
            with `variables`, or a function that calls either or `attend`. Attention is found in
            whatever transformation it runs: jit, remat, scan, vmap, a derivative.
        *inputs: what the model is called with.
        real: which tokens are real: a bool array `[*B, L]` for every attention with L keys, or a
            dict of such arrays by pattern, `{"encoder/*": ..., "*cross*": ...}`, the first that
            matches a path counting. Queries of self-attentions that are not real are left out of
            means.
        loss: `loss(output)`, a scalar: gradient norms are computed too, at a backward pass's cost.
        weights: whether readings carry their weights, of size T·S.
        similarity: whether heads are compared, at the cost of one more pass over the scores.
        rollout: whether what layers add up to is computed, of size T·T.
        variables: a Linen module's, where it is not bound.
        method: the name of the method to call instead of the module itself.
        **options: keyword arguments of the call, such as `deterministic=True`.

    Returns:
        A `Capture`, which maps each attention's path to its `Reading`; scanned layers have paths
        with their number, `layers/self_attention[0]`.

    Raises:
        ValueError: no attention of ours ran; patterns that match nothing; what does not fit.
        NotImplementedError: attention inside a while loop, or in one branch of a condition alone.
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
    wanted = Wanted(tuple(candidates), weights, similarity, rollout)
    call = _Call(*parts[:2], method, structure, static, wanted, loss)
    given = parts.parameters, parts.rest, arrays, tuple(candidates.values())
    if parts.flavour == "function" or loss is not None or not _is_hashable(call):
        # Compiled for this call alone: what a function closes over may have changed since the last.
        found = jax.jit(lambda *given: _capture(call, *given))(*given)
    else:
        found = _compiled(call, *given)
    output, readings, norms, bad = found
    if not readings:
        raise ValueError(
            "no attention of attention_jax ran in this model, those of the sub-quadratic families "
            "aside: build it from attention_jax's modules, give Flax's an attention_fn, or call "
            "attend"
        )
    ordered = _apart(dict(sorted(readings.items(), key=lambda item: item[1].facts.order)))
    for pattern in candidates:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in ordered):
            raise ValueError(f"real: {pattern!r} matches none of {', '.join(ordered)}")
        _check_fits(pattern, candidates[pattern], ordered)
    rolled = None
    if rollout:
        rolled = maps.rollout({path: x.mean_map for path, x in ordered.items()})
    return Capture(output, ordered, norms, rolled, bad)


def _check_fits(pattern: str, real: Any, readings: Mapping[str, Reading]) -> None:
    """Raises where what is real fits not one attention that it is for."""
    own = {path: x for path, x in readings.items() if fnmatch.fnmatchcase(path, pattern)}
    if all(x.padding_share is None and x.entropy.size for x in own.values()):
        shapes = {f"{path} has {[*x.entropy.shape[:-2], x.facts.keys]}" for path, x in own.items()}
        raise ValueError(
            f"real[{pattern!r}] {list(real.shape)} must be [*B, S] of an attention it is for, and "
            f"is of none: {', '.join(sorted(shapes))}"
        )


def _is_hashable(call: _Call) -> bool:
    try:
        hash(call)
    except TypeError:
        return False
    return True


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

    watch = flavours.Watch(lambda *seen: look(call.wanted, real, *seen))
    output, found = flavours.run(model(parameters), watch, call.method, args, options)
    readings = {
        name: settle(call.wanted, real, name, order, x)
        for order, (name, x) in enumerate(found.items())
    }
    arrays = flavours.parameters_by_path(model(parameters), parameters)
    readings = {
        name: dataclasses.replace(reading, out_weight=_out_weight(arrays, found[name].tag.path))
        for name, reading in readings.items()
    }
    if call.loss is None:
        return output, readings, None, None

    def lost(parameters: Any) -> Array:
        output, _ = flavours.run(model(parameters), None, call.method, args, options)
        return call.loss(output)  # type: ignore[misc]

    gradients = flavours.parameters_by_path(model(parameters), jax.grad(lost)(parameters))
    places = {name: x.tag.path for name, x in found.items()}
    return output, readings, gradient_norms(gradients, places), _bad(gradients)


def _out_weight(arrays: Mapping[str, Array], place: str) -> Array | None:
    """Norms of the heads' parts of `out`'s kernel `[*layers, N, V, D]`."""
    kernel = arrays.get(f"{place}/out/kernel".lstrip("/"))
    if kernel is None or kernel.ndim < 3:
        return None
    return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=(-2, -1)))


_compiled = jax.jit(_capture, static_argnums=(0,))


def gradient_norms(
    gradients: Mapping[str, Array], places: Mapping[str, str]
) -> dict[str, dict[str, Array]]:
    """The norms of each attention's gradients by the names of its parts, and "all" of them."""
    found: dict[str, dict[str, Array]] = {}
    for path, place in places.items():
        start = f"{place}/" if place else ""
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
