"""Importance of heads, by the gradient of a gate on each head or by ablation; head masking.

out = Σ_n ξ_n head_n(x) W_n,   ξ = 1
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.docstrings import arguments_of
from attention_jax._modules.arguments import check_choice
from attention_jax.diagnostics.application import Application, Call, prepare
from attention_jax.diagnostics.capture import capture
from attention_jax.diagnostics.collect import Collected
from attention_jax.kernels.request import Result


class _Gates(NamedTuple):
    """The gates of one attention.

    Attributes:
        number: index of the attention, in order of execution.
        layers: lengths of the enclosing scans.
        batch: the batch axes.
        heads: N.
    """

    number: int
    layers: tuple[int, ...]
    batch: tuple[int, ...]
    heads: int

    def names(self, path: str) -> list[str]:
        """The paths of its layers, as in `capture`."""
        return [path + "".join(f"[{i}]" for i in at) for at in np.ndindex(*self.layers)]


def _run(model: Application, gates: Mapping[int, Array]) -> tuple[Any, dict[str, Collected]]:
    """Runs a model with gates `[*layers, *#B, N]` on its heads, by index of the attention."""

    def record(call: Call) -> tuple[Result, Array]:
        layout = call.request.layout
        return call.run(call.request), jnp.zeros((*layout.batch, layout.N, 0), jnp.float32)

    return model.run(record, {number: gate[..., None, :, None] for number, gate in gates.items()})


def _find_gates(model: Application) -> dict[str, _Gates]:
    """The gates by path, in order of execution, without running the model."""
    paths: list[str] = []

    def trace() -> list[Collected]:
        found = _run(model, {})[1]
        paths.extend(found)
        return list(found.values())

    found = jax.eval_shape(trace)
    if not found:
        raise ValueError("no attention of attention_jax ran in this model")
    gates = {}
    for number, (path, x) in enumerate(zip(paths, found, strict=True)):
        shape, lead = x.values.shape[:-1], len(x.layers)
        gates[path] = _Gates(number, x.layers, shape[lead:-1], shape[-1])
    return gates


@arguments_of(capture)
def head_importance(  # noqa: D417
    model: Any,
    *inputs: Any,
    loss: Callable[[Any], Any],
    kind: str = "gradient",
    normalize: bool = False,
    variables: Any = None,
    method: str | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The importance of each head of each attention for a loss.

        gradient   I_n = Σ over examples |∂L / ∂ξ_n(x)|,  ξ a gate of 1 on the head's output
        ablation   I_n = L without head n - L

    The gradient takes one backward pass for all heads, ablation one forward pass for each head.

    Args:
        loss: `loss(output)`, a scalar that is a mean over examples.
        kind: "gradient" or "ablation".
        normalize: whether to divide the values of an attention by their Euclidean norm, as in the
            paper, so that attentions can be compared.

    Returns:
        `[N]` for each attention, by its path; scanned layers have indexed paths, as in `capture`.

    Raises:
        ValueError: the model calls no attention of ours, or an unknown kind.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import MultiHeadAttention
        >>> layer = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
        >>> layer.out.kernel[2] = 0.0
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 16))
        >>> worth = aj.diagnostics.head_importance(layer, x, loss=lambda y: (y**2).mean())
        >>> int(worth["MultiHeadAttention"].argmin())
        2

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650,
        eq. 2 (§4.1), and §3.2 (ablation).
    """
    check_choice("kind", kind, "gradient", "ablation")
    applied = prepare(model, variables, method, inputs, options)
    every = _find_gates(applied)

    def gated_loss(gates: dict[int, Array]) -> Array:
        return loss(_run(applied, gates)[0])

    if kind == "gradient":
        shapes = {g.number: (*g.layers, *g.batch, g.heads) for g in every.values()}
        ones = {number: jnp.ones(shape, jnp.float32) for number, shape in shapes.items()}
        slopes = jax.jit(jax.grad(gated_loss))(ones)
        importance = [
            np.abs(np.asarray(slopes[g.number])).reshape(-1, math.prod(g.batch), g.heads).sum(1)
            for g in every.values()
        ]
    else:
        importance = _ablate(gated_loss, list(every.values()))
    found = {
        name: row
        for (path, gates), rows in zip(every.items(), importance, strict=True)
        for name, row in zip(gates.names(path), rows, strict=True)
    }
    if normalize:
        found = {path: x / (float(np.linalg.norm(x)) or 1.0) for path, x in found.items()}
    return found


def _ablate(loss: Callable[[Any], Array], every: Sequence[_Gates]) -> list[np.ndarray]:
    """The loss without each head minus the loss with all; one compiled program, run in a loop."""
    shapes = [(*gates.layers, gates.heads) for gates in every]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def without(removed: Array) -> Array:
        parts = jnp.split(1 - removed, ends[:-1].tolist())
        return loss({g.number: x.reshape(s) for g, x, s in zip(every, parts, shapes, strict=True)})

    removed = jnp.concatenate([jnp.zeros((1, ends[-1])), jnp.eye(int(ends[-1]))])
    losses = np.asarray(jax.jit(functools.partial(jax.lax.map, without))(removed))
    importance = np.split(losses[1:] - losses[0], ends[:-1].tolist())
    return [x.reshape(-1, gates.heads) for x, gates in zip(importance, every, strict=True)]


@arguments_of(capture)
def mask_heads(  # noqa: D417
    model: Any,
    *inputs: Any,
    heads: Mapping[str, Sequence[int]],
    variables: Any = None,
    method: str | None = None,
    **options: Any,
) -> Any:
    """The output of a model with the outputs of some heads set to 0, as pruning would give it.

    Args:
        heads: the heads to mask, by the attention's path as in `capture`.

    Returns:
        The output of the model.

    Raises:
        ValueError: a path or a head that does not exist.
    """
    applied = prepare(model, variables, method, inputs, options)
    every = _find_gates(applied)
    layers = {
        name: (path, i) for path, gates in every.items() for i, name in enumerate(gates.names(path))
    }
    masks: dict[int, np.ndarray] = {}
    for name, masked in heads.items():
        if name not in layers:
            raise ValueError(f"heads: no attention {name!r}; there are {', '.join(layers)}")
        path, i = layers[name]
        number, shape, _, count = every[path]
        wrong = [n for n in masked if not 0 <= n < count]
        if wrong:
            raise ValueError(f"heads: {name!r} has heads 0 to {count - 1}, not {wrong[0]}")
        mask = masks.setdefault(number, np.ones((*shape, count), np.float32))
        mask.reshape(-1, count)[i, list(masked)] = 0
    return _run(applied, {number: jnp.asarray(mask) for number, mask in masks.items()})[0]
