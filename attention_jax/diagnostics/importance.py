"""What a head is worth: by the gradient of a gate in front of it, or by leaving it out.

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
from attention_jax._modules.arguments import check_choice
from attention_jax.diagnostics import flavours
from attention_jax.kernels.request import Request, Result


class _Gates(NamedTuple):
    """The gates of one attention: their number in the order of running, and axes.

    Attributes:
        number: its place in the order.
        layers: lengths of the scans around it.
        batch: the axes of examples.
        heads: N.
    """

    number: int
    layers: tuple[int, ...]
    batch: tuple[int, ...]
    heads: int

    def names(self, path: str) -> list[str]:
        """What its layers are called, as `capture` calls them: the path alone, or with numbers."""
        return [path + "".join(f"[{i}]" for i in at) for at in np.ndindex(*self.layers)]


class _Task(NamedTuple):
    """A model with its inputs, to be run with any gates."""

    model: flavours.Model
    method: str | None
    args: Any
    options: Any

    def run(self, gates: Mapping[int, Array]) -> tuple[Any, dict[str, flavours.Found]]:
        """The output with gates `[*layers, *#B, N]` by number, and who ran, by path."""

        def look(request: Request, run: Any, implementation: Any, kind: str) -> tuple[Result, Any]:
            layout = request.layout
            return run(request), jnp.zeros((*layout.batch, layout.N, 0), jnp.float32)

        wide = {number: gate[..., None, :, None] for number, gate in gates.items()}
        watch = flavours.Watch(look)
        return flavours.run(self.model, watch, self.method, self.args, self.options, wide)

    def gates(self) -> dict[str, _Gates]:
        """The gates by path, in the order of running, without running."""
        found: dict[str, flavours.Found] = {}

        def look() -> Any:
            found.update(self.run({})[1])
            return [x.leaves for x in found.values()]

        shapes = [leaf.shape[:-1] for (leaf,) in jax.eval_shape(look)]
        if not found:
            raise ValueError("no attention of attention_jax ran in this model")
        made = {}
        for number, (path, shape) in enumerate(zip(found, shapes, strict=True)):
            layers = found[path].layers
            made[path] = _Gates(number, layers, shape[len(layers) : -1], shape[-1])
        return made


def _task(model: Any, inputs: Any, variables: Any, method: Any, options: Any) -> _Task:
    return _Task(flavours.take_apart(model, variables), method, inputs, options)


def head_importance(
    model: Any,
    *inputs: Any,
    loss: Callable[[Any], Any],
    kind: str = "gradient",
    normalize: bool = False,
    variables: Any = None,
    method: str | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """How much the loss depends on each head of each attention.

        gradient   I_n = Σ over examples |∂L / ∂ξ_n(x)|,  ξ a gate of 1 before the head's output
        ablation   I_n = L without head n - L

    By gradient it takes one backward pass for all heads; by ablation one forward pass for each.

    Args:
        model: as in `capture`; and so are the others.
        *inputs: as in `capture`.
        loss: `loss(output)`, a scalar that is a mean over examples.
        kind: "gradient" or "ablation".
        normalize: whether an attention's values are divided by their Euclidean length, as in the
            paper, so that attentions can be compared.
        variables: as in `capture`.
        method: as in `capture`.
        **options: as in `capture`.

    Returns:
        `[N]` for each attention, by its path; scanned layers have paths with their number, as in
        `capture`.

    Raises:
        ValueError: no attention of ours ran, an unknown kind.

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
    task = _task(model, inputs, variables, method, options)
    every = task.gates()

    def lost(gates: dict[int, Array]) -> Array:
        return loss(task.run(gates)[0])

    if kind == "gradient":
        gates = {
            part.number: jnp.ones((*part.layers, *part.batch, part.heads), jnp.float32)
            for part in every.values()
        }
        slopes = jax.jit(jax.grad(lost))(gates)
        worth = [
            np.abs(np.asarray(slopes[part.number]))
            .reshape(-1, math.prod(part.batch), part.heads)
            .sum(1)
            for part in every.values()
        ]
    else:
        worth = _ablate(lost, list(every.values()))
    found = {
        name: row
        for (path, part), rows in zip(every.items(), worth, strict=True)
        for name, row in zip(part.names(path), rows, strict=True)
    }
    if normalize:
        lengths = {path: float(np.linalg.norm(x)) for path, x in found.items()}
        found = {path: x / (lengths[path] or 1.0) for path, x in found.items()}
    return found


def _ablate(lost: Callable[[Any], Array], every: Sequence[_Gates]) -> list[np.ndarray]:
    """The loss without each head in turn, less the loss with all: one program, run in a loop."""
    shapes = [(*part.layers, part.heads) for part in every]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def without(shut: Array) -> Array:
        parts = jnp.split(1 - shut, ends[:-1].tolist())
        return lost({g.number: x.reshape(s) for g, x, s in zip(every, parts, shapes, strict=True)})

    shut = jnp.concatenate([jnp.zeros((1, ends[-1])), jnp.eye(int(ends[-1]))])
    losses = np.asarray(jax.jit(functools.partial(jax.lax.map, without))(shut))
    worth = np.split(losses[1:] - losses[0], ends[:-1].tolist())
    return [x.reshape(-1, part.heads) for x, part in zip(worth, every, strict=True)]


def silence_heads(
    model: Any,
    *inputs: Any,
    heads: Mapping[str, Sequence[int]],
    variables: Any = None,
    method: str | None = None,
    **options: Any,
) -> Any:
    """The model's output with some heads putting out 0: what pruning them will give.

    Args:
        model: as in `capture`; and so are the others.
        *inputs: as in `capture`.
        heads: for each attention by path, as `capture` names them, the heads to silence.
        variables: as in `capture`.
        method: as in `capture`.
        **options: as in `capture`.

    Returns:
        What the model returns.

    Raises:
        ValueError: a path or a head that is not there.
    """
    task = _task(model, inputs, variables, method, options)
    every = task.gates()
    places = {
        name: (path, i) for path, part in every.items() for i, name in enumerate(part.names(path))
    }
    gates: dict[int, np.ndarray] = {}
    for name, shut in heads.items():
        if name not in places:
            raise ValueError(f"heads: no attention {name!r}; there are {', '.join(places)}")
        path, i = places[name]
        layers, count = every[path].layers, every[path].heads
        wrong = [n for n in shut if not 0 <= n < count]
        if wrong:
            raise ValueError(f"heads: {name!r} has heads 0 to {count - 1}, and no {wrong[0]}")
        gate = gates.setdefault(every[path].number, np.ones((*layers, count), np.float32))
        gate.reshape(-1, count)[i, list(shut)] = 0
    return task.run({number: jnp.asarray(gate) for number, gate in gates.items()})[0]
