"""Compares an attention function with the reference: values and all gradients.

All comparisons use one compiled function, so that cases with equal shapes share a compilation.
"""

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.testing.problems import Problem, Sizes

TOLERANCES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "float64": (1e-11, 1e-12),
        "float32": (1e-5, 2e-6),
        "float16": (2e-3, 2e-3),
        "bfloat16": (2e-2, 2e-2),
    }
)
"""(rtol, atol) by dtype."""


class Mismatch(AssertionError):
    """A result that differs from the reference."""


class Runner:
    """An attention function under test, and the features it supports.

    Args:
        f: the function.
        supports: names from `FEATURES`.
        scores: the namespace of score factories, or None.
        masks: the namespace of mask factories, or None.
        tolerances: (rtol, atol) by dtype.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        supports: frozenset[str],
        scores: Any,
        masks: Any,
        tolerances: Mapping[str, tuple[float, float]],
    ):
        self.f, self.supports = f, supports
        self.scores, self.masks, self.tolerances = scores, masks, tolerances
        self.seed("")
        self._values = jax.jit(self._run, static_argnames=("score", "mask_object"))
        self._pullback = jax.jit(self._run_back, static_argnames=("score", "mask_object"))

    def seed(self, name: str) -> None:
        """Seeds the random numbers of a case, independently of the cases before."""
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def sizes(self, **changes: Any) -> Sizes:
        """The most general sizes that f supports; `changes` by letter."""
        sizes = Sizes()
        if "lengths" not in self.supports:
            sizes = sizes._replace(S=sizes.T)
        if "grouped_heads" not in self.supports:
            sizes = sizes._replace(K=sizes.N)
        if "value_depth" not in self.supports:
            sizes = sizes._replace(V=sizes.H)
        return sizes._replace(**changes)

    def with_keywords(self, **keywords: Any) -> "Runner":
        """The same function with static keywords."""
        f = partial(self.f, **keywords)
        return Runner(f, self.supports, self.scores, self.masks, self.tolerances)

    def check(
        self,
        problem: Problem,
        *,
        mask_object: Callable[[Any], Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
        **reference: Any,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Compares the output and every supported gradient with the reference.

        Args:
            problem: the inputs; its mask is that of the reference.
            mask_object: makes the mask of f from the namespace of factories; None passes the
                problem's array.
            keywords: further keywords for f, such as positions.
            **reference: further arguments for the reference.

        Returns:
            Output and gradients of f, as NumPy arrays.
        """
        expected = problem.reference(**reference).out
        d_out = self.rng.normal(size=expected.shape).astype(np.float32)
        out, gradients = self.run(problem, d_out, mask_object=mask_object, keywords=keywords)
        self.compare("out", out, expected, problem.query.dtype)
        if gradients:
            exact = problem.gradients(d_out, **reference)
            for name, got in gradients.items():
                if name == "params":
                    for parameter, g in got.items():
                        like = problem.params[parameter].dtype
                        label = f"gradient of {parameter}"
                        self.compare(label, g, exact.params[parameter], like, problem.query.dtype)
                else:
                    like = getattr(problem, name).dtype
                    label = f"gradient of {name}"
                    self.compare(label, got, getattr(exact, name), like, problem.query.dtype)
        return out, gradients

    def run(
        self,
        problem: Problem,
        d_out: np.ndarray,
        *,
        mask_object: Callable[[Any], Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The output of f, and its gradients if they are supported."""
        floats = problem.floats()
        fixed: dict[str, Any] = dict(keywords or {})
        if problem.mask is not None and mask_object is None:
            fixed["mask"] = problem.mask
        if "bias" in floats and "bias_gradient" not in self.supports:
            fixed["bias"] = floats.pop("bias")
        how = {"score": problem.score, "mask_object": mask_object}
        if "gradients" not in self.supports:
            return jax.tree.map(np.asarray, self._values(floats, fixed, **how)), {}
        return jax.tree.map(np.asarray, self._pullback(floats, fixed, d_out, **how))

    def call(self, floats: Mapping[str, Any], fixed: Mapping[str, Any], **how: Any) -> jax.Array:
        """Calls f with named arguments; factories make its score and its mask object."""
        return self._run(floats, fixed, **{"score": "scaled_dot", "mask_object": None, **how})

    def _run(
        self,
        floats: Mapping[str, Any],
        fixed: Mapping[str, Any],
        *,
        score: str,
        mask_object: Callable[[Any], Any] | None,
    ) -> jax.Array:
        given = {**floats, **fixed}
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        params = given.pop("params", {})
        if score != "scaled_dot" or params:
            if self.scores is None:
                given.update(params)
            else:
                given["score"] = getattr(self.scores, score)(**params)
        if mask_object is not None:
            given["mask"] = mask_object(self.masks)
        return self.f(query, key, value, **given)

    def _run_back(
        self, floats: Mapping[str, Any], fixed: Mapping[str, Any], d_out: Any, **how: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        out, pull = jax.vjp(partial(self._run, fixed=fixed, **how), floats)
        if out.shape != d_out.shape:
            raise Mismatch(f"out has shape {out.shape}, expected {d_out.shape}")
        (gradients,) = pull(jnp.asarray(d_out).astype(out.dtype))
        return out, gradients

    def compare(
        self,
        what: str,
        got: Any,
        expected: np.ndarray,
        dtype: Any,
        precision: Any = None,
        slack: float = 1.0,
    ) -> None:
        """Raises a `Mismatch` unless a result has the expected shape, dtype and values.

        Args:
            what: name of the result, for the error.
            got: the result.
            expected: the reference, in float64.
            dtype: the expected dtype.
            precision: the dtype of the computation, if it is another one.
            slack: a factor on the tolerances.
        """
        got = np.asarray(got)
        if got.shape != expected.shape:
            raise Mismatch(f"{what} has shape {got.shape}, expected {expected.shape}")
        if got.dtype != np.dtype(dtype):
            raise Mismatch(f"{what} has dtype {got.dtype}, expected {np.dtype(dtype)}")
        if not got.size:
            return
        names = {np.dtype(dtype).name, np.dtype(precision or dtype).name}
        rtol = slack * max(self.tolerances[name][0] for name in names)
        atol = slack * max(self.tolerances[name][1] for name in names)
        atol *= max(1.0, float(np.abs(expected).max()))
        error = np.abs(got.astype(np.float64) - expected)
        excess = np.where(np.isfinite(error), error - atol - rtol * np.abs(expected), np.inf)
        if excess.max() > 0:
            worst = np.unravel_index(int(excess.argmax()), error.shape)
            index = tuple(int(i) for i in worst)
            raise Mismatch(
                f"{what}: max error {error[worst]:.3g} at {index}: got {got[worst]:.6g}, "
                f"expected {expected[worst]:.6g} (rtol {rtol:g}, atol {atol:g})"
            )
