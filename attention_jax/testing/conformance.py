"""The conformance suite: one table of cases for every implementation of attention.

`check_attention(f, supports=...)` compares f with the float64 reference, values and all gradients,
on sizes that no block size divides. A case runs if `supports` names all features that it needs.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attention_jax.testing.conformance_cases import CASES
from attention_jax.testing.runner import TOLERANCES, Mismatch, Runner

FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "mask": "`mask=`: a boolean array [*B, N, T, S], True = may attend",
        "bias": "`bias=`: a float array [*B, N, T, S], added to the scores",
        "broadcast": "axes of size 1 in mask and bias",
        "fewer_axes": "mask and bias with fewer axes, such as [T, S]",
        "lengths": "T and S that differ",
        "grouped_heads": "N a multiple of K; query head n uses key head n // (N // K)",
        "value_depth": "a value depth V other than H",
        "no_batch": "no batch axis at all",
        "many_batch": "several batch axes",
        "no_keys": "S = 0, and T = 0",
        "empty_rows": "a query without visible keys: out 0 and gradient 0",
        "hidden_nan": "masked NaN and inf change neither outputs nor gradients",
        "minus_infinity": "a bias of -inf masks a pair, and a row of them is empty",
        "gradients": "reverse mode, with respect to query, key, value and the score's parameters",
        "bias_gradient": "reverse mode with respect to the bias, summed over broadcast axes",
        "forward_mode": "jax.jvp",
        "second_order": "the derivative of a gradient, by jax.jvp and by jax.grad",
        "vmap": "jax.vmap over any axis of any argument",
        "eager": "calls outside jax.jit",
        "float16": "float16, with scores outside of its range",
        "bfloat16": "bfloat16",
        "float64": "float64 throughout, where JAX has it enabled",
        "mixed_dtypes": "query, key, value and bias of different dtypes; out has the query's",
        "scale": "`scale=`: a number in place of 1/√H",
        "scores": "`score=`: score objects (pass the namespace of their factories as `scores=`)",
        "masks": "mask objects in `mask=` (pass the namespace of their factories as `masks=`)",
        "positions": "`query_positions=` and `key_positions=`, with mask objects",
        "dropout": "`dropout_rate=` and `dropout_key=`, one independent mask entry per pair",
    }
)
"""The features of an implementation, with their meanings."""


def check_attention(
    f: Callable[..., Any],
    supports: Iterable[str],
    *,
    scores: Any = None,
    masks: Any = None,
    tolerances: Mapping[str, tuple[float, float]] | None = None,
    only: str = "",
) -> list[str]:
    """Runs the conformance suite on an attention function.

    The suite calls `f(query, key, value, **keywords)` with query `[*B, T, N, H]`, key
    `[*B, S, K, H]`, value `[*B, S, K, V]` and keywords that `supports` names; f returns
    `[*B, T, N, V]`.

    Args:
        f: the implementation, with the signature of `attention_jax.attend`.
        supports: names from `FEATURES`; `FEATURES` itself is all of them.
        scores: with "scores", a namespace of functions that return the `score=` of f, named as in
            `reference_scores.SCORES`, such as `attention_jax.scores`.
        masks: with "masks", a namespace of mask factories, such as `attention_jax.masks`.
        tolerances: (rtol, atol) by dtype name, instead of the defaults; atol is relative to the
            largest expected entry if that is above 1.
        only: text; only cases with it in their name run.

    Returns:
        The names of the cases that ran.

    Raises:
        AssertionError: names every failed case and its largest error.
        ValueError: an unknown feature, a missing namespace, or a text that no name contains.

    Example:
        >>> import jax
        >>> names = check_attention(
        ...     jax.nn.dot_product_attention, {"mask", "lengths"}, only="values"
        ... )
        >>> names
        ['values', 'values with a mask']
    """
    declared = frozenset(supports)
    unknown = sorted(declared - set(FEATURES))
    if unknown:
        raise ValueError(f"supports names {unknown}; the features are {sorted(FEATURES)}")
    for name, space in (("scores", scores), ("masks", masks)):
        if name in declared and space is None:
            raise ValueError(
                f"supports names {name!r}: pass their factories, {name}=attention_jax.{name}"
            )
    unmet = sorted({"positions"} & declared) if "masks" not in declared else []
    if unmet:
        raise ValueError(f"supports names {unmet}, which needs 'masks'")
    runner = Runner(f, declared, scores, masks, {**TOLERANCES, **(tolerances or {})})
    cases = [case for case in CASES if case.needs <= declared and only in case.name]
    if not cases:
        raise ValueError(f"no case has {only!r} in its name: {[case.name for case in CASES]}")
    failures: list[str] = []
    first: Exception | None = None
    for case in cases:
        runner.seed(case.name)
        try:
            case.check(runner)
        except Mismatch as error:
            failures.append(f"{case.name}: {error}")
        except Exception as error:  # a failure of this case; the others still run
            text = str(error).partition("\n")[0]
            failures.append(f"{case.name}: raised {type(error).__name__}: {text}")
            first = first or error
    if failures:
        count = f"{len(failures)} of {len(cases)} cases failed"
        raise AssertionError("\n  ".join([count, *failures])) from first
    return [case.name for case in cases]
