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
from attention_jax.diagnostics.application import Application, Call, prepare
from attention_jax.diagnostics.capture import capture
from attention_jax.diagnostics.collect import Collected
from attention_jax.kernels.request import Result
from attention_jax.layers.arguments import check_choice


class _Gates(NamedTuple):
    """The gates `[*layers, *batch, heads]` of one attention; layers are lengths of scans."""

    path: str
    layers: tuple[int, ...]
    batch: tuple[int, ...]
    heads: int

    @property
    def names(self) -> list[str]:
        """The paths of its layers, as in `capture`."""
        return [self.path + "".join(f"[{i}]" for i in at) for at in np.ndindex(*self.layers)]


def _run(model: Application, gates: Sequence[Any]) -> tuple[Any, dict[str, Collected]]:
    """Runs a model with gates `[*layers, *#B, N]` on the heads of each attention, in order."""

    def record(call: Call) -> tuple[Result, Array]:
        layout = call.request.layout
        return call.run(call.request), jnp.zeros((*layout.batch, layout.N, 0), jnp.float32)

    wide = {i: jnp.asarray(gate)[..., None, :, None] for i, gate in enumerate(gates)}
    return model.run(record, wide)


def _find_gates(model: Application) -> list[_Gates]:
    """The gates of every attention, in order of execution, without running the model."""
    paths: list[str] = []

    def trace() -> list[Collected]:
        found = _run(model, [])[1]
        paths.extend(found)
        return list(found.values())

    found = jax.eval_shape(trace)
    if not found:
        raise ValueError("no attention of attention_jax ran in this model")
    shapes = [(x.layers, x.values.shape[len(x.layers) : -1]) for x in found]
    return [_Gates(p, n, axes[:-1], axes[-1]) for p, (n, axes) in zip(paths, shapes, strict=True)]


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
    measure = _differentiate if kind == "gradient" else _ablate
    importance = measure(lambda gates: loss(_run(applied, gates)[0]), every)
    names = [name for gates in every for name in gates.names]
    rows = [row for x in importance for row in x]
    if normalize:
        rows = [row / (float(np.linalg.norm(row)) or 1.0) for row in rows]
    return dict(zip(names, rows, strict=True))


def _differentiate(
    loss: Callable[[list[Array]], Array], every: Sequence[_Gates]
) -> list[np.ndarray]:
    """The absolute gradient of each gate, summed over examples; `[layers, N]` an attention."""
    ones = [jnp.ones((*g.layers, *g.batch, g.heads), jnp.float32) for g in every]
    slopes = map(np.asarray, jax.jit(jax.grad(loss))(ones))
    return [
        np.abs(x).reshape(-1, math.prod(g.batch), g.heads).sum(1)
        for x, g in zip(slopes, every, strict=True)
    ]


def _ablate(loss: Callable[[list[Array]], Array], every: Sequence[_Gates]) -> list[np.ndarray]:
    """The loss without each head minus the loss with all; one compiled program, run in a loop."""
    shapes = [(*gates.layers, gates.heads) for gates in every]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def without(removed: Array) -> Array:
        parts = jnp.split(1 - removed, ends[:-1].tolist())
        return loss([x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)])

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
    masks = [np.ones((math.prod(gates.layers), gates.heads), np.float32) for gates in every]
    rows = {
        name: row
        for x, gates in zip(masks, every, strict=True)
        for name, row in zip(gates.names, x, strict=True)
    }
    for name, masked in heads.items():
        if name not in rows:
            raise ValueError(f"heads: no attention {name!r}; there are {', '.join(rows)}")
        wrong = [n for n in masked if not 0 <= n < rows[name].size]
        if wrong:
            raise ValueError(
                f"heads: {name!r} has heads 0 to {rows[name].size - 1}, not {wrong[0]}"
            )
        rows[name][list(masked)] = 0
    shaped = [x.reshape(*gates.layers, gates.heads) for x, gates in zip(masks, every, strict=True)]
    return _run(applied, shaped)[0]
