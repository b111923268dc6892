"""Shardings of query, key, value and output by batch and heads."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

AxisNames = str | tuple[str, ...] | None


def placement(
    mesh: Mesh, *, batch: AxisNames = None, heads: AxisNames = None, batch_axes: int = 1
) -> NamedSharding:
    """The sharding of query, key, value and output, `[*B, T, N, H]`, by batch and heads.

    Examples and heads are independent, so this sharding needs no communication: `attend` under
    `jax.jit` keeps it in the forward and the backward pass. The dropout mask is the same as on one
    device.

    Args:
        mesh: the device mesh.
        batch: mesh axes that shard the first batch axis; None replicates it.
        heads: mesh axes that shard the heads. They shard key/value heads too, so K must be a
            multiple of the number of devices on these axes.
        batch_axes: number of batch axes of the arrays.

    Returns:
        A sharding for `jax.device_put`, `in_shardings` or `jax.lax.with_sharding_constraint`.

    Raises:
        ValueError: a name that is not an axis of the mesh, a name used twice, or `batch` without a
            batch axis.

    Example:
        >>> import jax
        >>> import attention_jax as aj
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> tuple(aj.sharding.placement(mesh, batch="data", heads="model").spec)
        ('data', None, 'model', None)
    """
    check_names(mesh, batch=batch, heads=heads)
    if batch is not None and batch_axes < 1:
        raise ValueError(f"batch {batch!r} shards a batch axis, but batch_axes is {batch_axes}")
    lead = (batch, *(None,) * (batch_axes - 1)) if batch_axes else ()
    return NamedSharding(mesh, PartitionSpec(*lead, None, heads, None))


def check_names(mesh: Mesh, **axes: AxisNames) -> None:
    """Checks that every name is an axis of the mesh and is used once."""
    seen: dict[str, str] = {}
    for argument, names in axes.items():
        for name in flat(names):
            if name not in mesh.axis_names:
                raise ValueError(
                    f"{argument} names mesh axis {name!r}; the mesh has {list(mesh.axis_names)}"
                )
            if name in seen:
                raise ValueError(f"mesh axis {name!r} is given for {seen[name]} and for {argument}")
            seen[name] = argument


def flat(names: AxisNames) -> tuple[str, ...]:
    """The names as a tuple."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
