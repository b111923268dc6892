"""The arrays of an attention without some of its heads, or with similar heads merged.

    out = Σ_{n kept} P_n (x W_n^value) W_n^out

The arrays are those of one layer, by part and name: `query`, `key` and `value` with kernels
`[D, heads, depth]`, `out` with `[N, V, D]`, and those of a score and a bias.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.term import Term
from attention_jax.scores import Score, scaled_dot

Arrays = dict[str, dict[str, Any]]


class Plan(NamedTuple):
    """The heads to keep.

    Attributes:
        kept: The query heads, in order.
        kv: For each new key/value head, the index of the old one.
    """

    kept: tuple[int, ...]
    kv: tuple[int, ...]


def make_plan(
    num_heads: int, num_kv_heads: int, pruned: Sequence[int], *, apart: bool = False
) -> Plan:
    """The heads to keep when `pruned` are removed.

    A key/value head is removed with the last query head that uses it. If the remaining groups
    differ in size, or `apart` is set, every query head gets a separate key/value head.

    Raises:
        TypeError: If `pruned` is not a sequence of integers.
        ValueError: If a head does not exist, or no head would remain.
    """
    numbers = np.asarray(list(pruned) if isinstance(pruned, Iterable) else pruned)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"heads must be a sequence of head numbers, got {pruned!r}")
    pruned = numbers.tolist()
    wrong = [n for n in pruned if not 0 <= n < num_heads]
    if wrong:
        raise ValueError(f"heads: there are heads 0 to {num_heads - 1}, and no {wrong[0]}")
    kept = tuple(n for n in range(num_heads) if n not in set(pruned))
    if not kept:
        raise ValueError(f"heads: all {num_heads} would go; an attention needs one")
    users = [n // (num_heads // num_kv_heads) for n in kept]
    counts = {j: users.count(j) for j in users}
    if apart or len(set(counts.values())) > 1:
        return Plan(kept, tuple(users))
    return Plan(kept, tuple(counts))


def make_plans(
    num_heads: int,
    num_kv_heads: int,
    pruned: Sequence[Sequence[int]],
    path: str,
    *,
    apart: bool = False,
) -> list[Plan]:
    """A plan for each layer; scanned layers must keep equally many heads.

    Raises:
        ValueError: As in `make_plan`, or if scanned layers would keep different numbers of heads.
    """
    plans = [make_plan(num_heads, num_kv_heads, x, apart=apart) for x in pruned]
    if len({len(plan.kept) for plan in plans}) > 1:
        left = ", ".join(str(len(plan.kept)) for plan in plans)
        raise ValueError(
            f"the layers scanned under {path!r} are of one shape and must keep as many heads, but "
            f"would keep {left}: prune as many in each, or build it with scan_layers=False"
        )
    if len({len(plan.kv) for plan in plans}) > 1:
        return [make_plan(num_heads, num_kv_heads, x, apart=True) for x in pruned]
    return plans


def check_linear(path: str, parts: Mapping[str, Iterable[str]]) -> None:
    """Checks by array names that the projections of an attention are linear layers.

    Raises:
        NotImplementedError: If one has arrays other than a kernel and a bias, as adapters have.
    """
    for part, names in parts.items():
        if "kernel" not in names or set(names) - {"kernel", "bias"}:
            raise NotImplementedError(
                f"{path!r}: the projection {part!r} holds {', '.join(sorted(names)) or 'nothing'} "
                "and not a kernel and a bias alone: merge an adapter into its kernel first"
            )


def prune_projections(arrays: Mapping[str, Mapping[str, Any]], plan: Plan) -> Arrays:
    """The projections of the kept heads, without other parts."""
    new: Arrays = {}
    for part, heads in (("query", plan.kept), ("key", plan.kv), ("value", plan.kv)):
        index = np.asarray(heads)
        new[part] = {
            name: jnp.take(jnp.asarray(x), index, axis=-2) for name, x in arrays[part].items()
        }
    out = dict(arrays["out"])
    out["kernel"] = jnp.take(jnp.asarray(out["kernel"]), np.asarray(plan.kept), axis=0)
    new["out"] = out
    return new


def prune_term(
    build: Callable[[dict[str, Any], int], Term | None],
    values: Mapping[str, Any],
    num_heads: int,
    kept: Sequence[int],
    depth: int,
) -> dict[str, Any] | None:
    """The parameters of a score or bias for the kept heads; None if they cannot be sliced.

    A term does not declare which of its arrays have a head axis. Slicing is therefore verified:
    the scores of random queries and keys must be those of the kept heads.

    Args:
        build: Makes the term from its arrays by name, for a number of heads.
        values: The arrays by name.
        num_heads: N.
        kept: The kept heads.
        depth: H.
    """
    values = {name: jnp.asarray(x) for name, x in values.items()}
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(n, num_heads, depth)).astype(np.float32) for n in (5, 7))
    index = np.asarray(kept)
    wanted = _scores(build(values, num_heads), query, key)[index]
    candidates = [n for n, x in values.items() if x.ndim and x.shape[0] == num_heads]
    for size in range(len(candidates), -1, -1):
        for chosen in itertools.combinations(candidates, size):
            new = {n: jnp.take(x, index, axis=0) if n in chosen else x for n, x in values.items()}
            try:
                found = _scores(build(new, len(kept)), query[:, index], key[:, index])
            except (TypeError, ValueError):
                continue
            if np.allclose(found, wanted, rtol=1e-3, atol=1e-4):
                return new
    return None


def _scores(term: Term | None, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    score: Any = term
    if not isinstance(term, Score):
        score = scaled_dot() if term is None else scaled_dot() + term
    return np.asarray(jax.jit(lambda query, key: score(query, key))(query, key))


def clusters(similarity: Any, threshold: float) -> list[list[int]]:
    """Groups of similar heads; every member is similar to the first head of its group.

    Args:
        similarity: `[N, N]`, or `[*B, N, N]`, which is averaged.
        threshold: The minimal similarity of two heads in a group.
    """
    similar = np.asarray(similarity, np.float64)
    similar = similar.reshape(-1, *similar.shape[-2:]).mean(0)
    groups: list[list[int]] = []
    for n in range(len(similar)):
        for group in groups:
            if similar[group[0], n] >= threshold:
                group.append(n)
                break
        else:
            groups.append([n])
    return groups


def merge_projections(
    arrays: Mapping[str, Mapping[str, Any]], groups: Sequence[Sequence[int]], plan: Plan
) -> Arrays:
    """The projections in which the first head of each group replaces the group.

    With equal maps P a group adds `P Σ_n [W_n^value; b_n^value] W_n^out` to the output: the sum is
    replaced by its best approximation of one head's rank (singular value decomposition).
    """
    new = prune_projections(arrays, plan)
    group_size = arrays["query"]["kernel"].shape[-2] // arrays["value"]["kernel"].shape[-2]
    value, out = new["value"], new["out"]
    biased = "bias" in value
    for at, group in enumerate(groups):
        if len(group) == 1:
            continue
        total: Any = 0.0
        for n in group:
            into = np.asarray(arrays["value"]["kernel"], np.float64)[:, n // group_size]
            if biased:
                shift = np.asarray(arrays["value"]["bias"], np.float64)[n // group_size]
                into = np.concatenate([into, shift[None]])
            total = total + into @ np.asarray(arrays["out"]["kernel"], np.float64)[n]
        left, right = _factors(total, value["kernel"].shape[-1])
        rows = left[:-1] if biased else left
        value["kernel"] = value["kernel"].at[:, at].set(_like(rows, value["kernel"]))
        if biased:
            value["bias"] = value["bias"].at[at].set(_like(left[-1], value["bias"]))
        out["kernel"] = out["kernel"].at[at].set(_like(right, out["kernel"]))
    return new


def _factors(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """`left [rows, rank] · right [rank, columns]`, the best approximation of the matrix."""
    left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
    root = np.sqrt(sizes[:rank])
    missing = max(0, rank - len(root))
    left, right = left[:, :rank] * root, root[:, None] * right[:rank]
    return np.pad(left, ((0, 0), (0, missing))), np.pad(right, ((0, missing), (0, 0)))


def _like(x: np.ndarray, other: Any) -> Array:
    return jnp.asarray(x, other.dtype)
