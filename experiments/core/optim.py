"""Training recipes: the optimiser, the schedule, and the scale of a float16 loss.

    g       ← g · min(1, clip / ‖g‖)
    θ_{t+1} = θ_t − f η s(t) (Adam(g) + λ θ_t),    s: a linear warm-up, then the schedule

    cosine         from 1 to 0 at the last step
    inverse-sqrt   √(warmup / t)
    constant       1

η and clip are part of the state, so that models that differ in them alone share a compiled step; f
is the factor of a parameter's group.

References:
    Kingma and Ba 2014, "Adam: a method for stochastic optimization", arXiv 1412.6980.
    Vaswani et al. 2017, "Attention is all you need", arXiv 1706.03762, §5.3 (warm-up,
    inverse-sqrt).
    Micikevicius et al. 2017, "Mixed precision training", arXiv 1710.03740, §3.1-3.2 (master
    weights, loss scale).
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("cosine", "inverse-sqrt", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")
_SCALE = 2.0**15  # of a float16 loss at the start
_GROWTH = 2000  # finite steps after which the scale doubles


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training.

    Attributes:
        steps: optimiser steps in all.
        learning_rate: η, the highest one, reached at the end of the warm-up.
        warmup: steps over which the learning rate grows from 0.
        schedule: one of `SCHEDULES`.
        clip: the largest global norm of a gradient; infinity for none.
        weight_decay: λ, of parameters with two axes or more.
        groups: pairs of a regular expression and a factor f: the first that is found in a
            parameter's path applies; 0 freezes the parameter. The default is 1.
        precision: the precision of losses and gradients, one of `PRECISIONS`; parameters and
            moments are float32. A float16 loss has a dynamic scale.
        observe_every: steps between two observations; start and end have one too.
        checkpoint_every: steps between two checkpoints.
        fetch_every: steps whose metrics are fetched together, so that steps are dispatched ahead.
    """

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 100
    schedule: str = "cosine"
    clip: float = 1.0
    weight_decay: float = 0.0
    groups: tuple[tuple[str, float], ...] = ()
    precision: str = "float32"
    observe_every: int = 50
    checkpoint_every: int = 100
    fetch_every: int = 1

    @classmethod
    def short(cls, steps: int, learning_rate: float, *, observations: int, **more: Any) -> "Recipe":
        """Return the recipe of the studies' small models, which differ only in these arguments."""
        found: dict[str, Any] = {
            "warmup": max(1, steps // 20),
            "observe_every": max(1, steps // observations),
            "checkpoint_every": max(100, steps // 5),
        }
        return cls(steps, learning_rate, **found | more)

    def compiled_part(self) -> "Recipe":
        """Return the fields that a compiled step depends on: those that are not in the state."""
        others = {"observe_every": 1, "checkpoint_every": 1, "fetch_every": 1}
        return dataclasses.replace(self, learning_rate=0.0, clip=0.0, **others)

    def optimizer(self) -> optax.GradientTransformation:
        """Return clipping, Adam (b2 and eps as Vaswani et al.), decay, schedule and rates."""
        warmup = min(self.warmup, self.steps)
        if self.schedule == "cosine":
            schedule = optax.warmup_cosine_decay_schedule(
                0.0, 1.0, warmup, max(self.steps, self.warmup + 1)
            )
        else:
            begin = max(warmup, 1)
            after = {
                "inverse-sqrt": lambda n: (begin / (n + begin)) ** 0.5,
                "constant": optax.constant_schedule(1.0),
            }[self.schedule]
            schedule = optax.join_schedules(
                [optax.linear_schedule(0.0, 1.0, warmup), after], [warmup]
            )
        decay = optax.add_decayed_weights(
            self.weight_decay, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        )
        return optax.chain(
            optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=self.clip),
            optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
            *([decay] if self.weight_decay else []),
            *([optax.stateless(self._grouped)] if self.groups else []),
            optax.scale_by_schedule(schedule),
            optax.inject_hyperparams(optax.scale)(step_size=-self.learning_rate),
        )

    def _grouped(self, updates: Any, params: Any) -> Any:
        del params

        def one(path: Any, update: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found = (factor for pattern, factor in self.groups if re.search(pattern, name))
            return update * next(found, 1.0)

        return jax.tree_util.tree_map_with_path(one, updates)

    def cast(self, tree: Any) -> Any:
        """Return arrays with the floating ones in the precision to compute in."""
        if self.precision == "float32":
            return tree

        def one(x: Any) -> Any:
            x = jnp.asarray(x)
            return x.astype(self.precision) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, tree)

    def loss_scale(self) -> dict[str, jax.Array] | None:
        """Return the initial scale of the loss, None if the precision needs none."""
        if self.precision != "float16":
            return None
        return {"scale": jnp.float32(_SCALE), "finite": jnp.int32(0)}


def next_scale(scale: dict[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
    """Return the next scale: half after an overflow, at least 1; twice after 2000 finite steps."""
    count = jnp.where(finite, scale["finite"] + 1, 0)
    grown = jnp.where(count >= _GROWTH, 2 * scale["scale"], scale["scale"])
    value = jnp.where(finite, grown, jnp.maximum(scale["scale"] / 2, 1.0))
    return {"scale": value, "finite": jnp.where(count >= _GROWTH, 0, count)}
