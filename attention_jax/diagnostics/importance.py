"""What a head is worth: by the gradient of a gate in front of it, or by leaving it out.

out = Σ_n ξ_n head_n(x) W_n,   ξ = 1
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.record import static
from attention_jax._modules.arguments import check_choice
from attention_jax.diagnostics import flavours
from attention_jax.kernels.request import Request, Result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Gates:
    """The gates of one attention, open, `[*layers, *B, N]`, and when and where it ran."""

    open: Any
    kind: str = static()
    order: int = static()
    axes: int = static()

    @property
    def layers(self) -> tuple[int, ...]:
        """The axes of scanned layers in front."""
        return self.open.shape[: self.open.ndim - self.axes]

    def names(self, path: str) -> list[str]:
        """What its layers are called, as `capture` calls them: the path alone, or with numbers."""
        return [path + "".join(f"[{i}]" for i in at) for at in np.ndindex(*self.layers)]


class _Task(NamedTuple):
    """A model with its inputs, to be run with any gates."""

    model: flavours.Model
    method: str | None
    args: Any
    options: Any

    def run(
        self, gates: Mapping[str, Array], every: Mapping[str, _Gates]
    ) -> tuple[Any, dict[str, _Gates]]:
        """The output with gates `[*layers, *#B, N]` by path, and open gates by path."""
        by_order = {every[path].order: gate for path, gate in gates.items()}
        scanned = {path: gate for path, gate in gates.items() if every[path].layers}

        def look(request: Request, run: Any, kind: str, order: int) -> tuple[Result, Any]:
            result, layout = run(request), request.layout
            # Of scanned layers all have one place in the order: each holds its own gate.
            gate = by_order.get(order) if (own := flavours.held()) is None else own
            if gate is not None:
                gate = gate.astype(result.out.dtype)[..., None, :, None]
                gate = gate.reshape((1,) * (result.out.ndim - gate.ndim) + gate.shape)
                result = result._replace(out=result.out * gate)
            gates_of_all = jnp.ones((*layout.batch, layout.N), jnp.float32)
            return result, _Gates(gates_of_all, kind, order, gates_of_all.ndim)

        watch, model = flavours.Watch(look), flavours.with_held(self.model, scanned)
        output, kept = flavours.run(model, watch, self.method, self.args, self.options)
        return output, {path or part.kind: part for path, part in kept.items()}

    def gates(self) -> dict[str, _Gates]:
        """The gates by path, in the order of running, without running."""
        found = jax.eval_shape(lambda: self.run({}, {})[1])
        if not found:
            raise ValueError("no attention of attention_jax ran in this model")
        for path, part in found.items():
            if part.layers and "#" in path:
                raise NotImplementedError(
                    f"{path}: an attention that a scanned layer runs more than once; build the "
                    "model with scan_layers=False"
                )
        return dict(sorted(found.items(), key=lambda item: item[1].order))


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

    def lost(gates: dict[str, Array]) -> Array:
        return loss(task.run(gates, every)[0])

    if kind == "gradient":
        gates = {path: jnp.ones(part.open.shape, jnp.float32) for path, part in every.items()}
        slopes = jax.jit(jax.grad(lost))(gates)
        examples = {
            path: tuple(range(len(part.layers), part.open.ndim - 1)) for path, part in every.items()
        }
        by_path = {path: np.abs(np.asarray(x)).sum(examples[path]) for path, x in slopes.items()}
    else:
        by_path = _ablate(lost, every)
    found = {
        name: row
        for path, part in every.items()
        for name, row in zip(
            part.names(path), by_path[path].reshape(-1, part.open.shape[-1]), strict=True
        )
    }
    if normalize:
        lengths = {path: float(np.linalg.norm(x)) for path, x in found.items()}
        found = {path: x / (lengths[path] or 1.0) for path, x in found.items()}
    return found


def _ablate(lost: Callable[[Any], Array], every: Mapping[str, _Gates]) -> dict[str, np.ndarray]:
    """The loss without each head in turn, less the loss with all: one program, run in a loop."""
    shapes = [(*part.layers, part.open.shape[-1]) for part in every.values()]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def without(shut: Array) -> Array:
        parts = jnp.split(1 - shut, ends[:-1].tolist())
        gates = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return lost(dict(zip(every, gates, strict=True)))

    shut = jnp.concatenate([jnp.zeros((1, ends[-1])), jnp.eye(int(ends[-1]))])
    losses = np.asarray(jax.jit(functools.partial(jax.lax.map, without))(shut))
    worth = np.split(losses[1:] - losses[0], ends[:-1].tolist())
    return dict(zip(every, worth, strict=True))


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
    gates: dict[str, np.ndarray] = {}
    for name, shut in heads.items():
        if name not in places:
            raise ValueError(f"heads: no attention {name!r}; there are {', '.join(places)}")
        path, i = places[name]
        layers, count = every[path].layers, every[path].open.shape[-1]
        wrong = [n for n in shut if not 0 <= n < count]
        if wrong:
            raise ValueError(f"heads: {name!r} has heads 0 to {count - 1}, and no {wrong[0]}")
        gate = gates.setdefault(path, np.ones((*layers, count), np.float32))
        gate.reshape(-1, count)[i, list(shut)] = 0
    return task.run({path: jnp.asarray(gate) for path, gate in gates.items()}, every)[0]
