"""A recipe whose learning rate and clipping are data, so that a sweep over them compiles once."""

import dataclasses
import math

import optax

from experiments.train import Recipe


@dataclasses.dataclass(frozen=True)
class SweptRecipe(Recipe):
    """As `Recipe`; models that differ in learning rate or ``clip`` alone share their compiled step.

    The two are kept in the optimiser's state, beside the moments. No clipping is an infinite
    ``clip``.
    """

    clip: float = math.inf

    def optimizer(self) -> optax.GradientTransformation:
        """Return clipping, Adam, the schedule and the learning rate, one after the other."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, min(self.warmup, self.steps), max(self.steps, self.warmup + 1)
        )
        return optax.chain(
            optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=self.clip),
            optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
            optax.scale_by_schedule(schedule),
            optax.inject_hyperparams(optax.scale)(step_size=-self.learning_rate),
        )
