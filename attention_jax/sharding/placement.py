"""Where query, key, value and output lie, when batch or heads are divided among devices."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

AxisNames = str | tuple[str, ...] | None


def placement(
    mesh: Mesh, *, batch: AxisNames = None, heads: AxisNames = None, batch_axes: int = 1
) -> NamedSharding:
    """The sharding of query `[*B, T, N, H]`, and of key, value and output alike.

    Attention of one example and one head needs nothing of another, so batch and heads divided this
    way cost no communication, forward or backward: `attend` under `jax.jit` keeps them apart.
    Dropout is that of one device.

    Args:
        mesh: the devices.
        batch: mesh axes that divide the first batch axis; None leaves it whole.
        heads: mesh axes that divide the heads. Key/value heads are divided too, so K must be a
            multiple of the number of devices on these axes.
        batch_axes: how many batch axes the arrays have.

    Returns:
        A sharding for `jax.device_put`, `in_shardings` or `jax.lax.with_sharding_constraint`.

    Raises:
        ValueError: a name that the mesh has not, one that is used twice, or a batch that is to be
            divided where there is no batch axis.

    Example:
        >>> import jax
        >>> import attention_jax as aj
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> tuple(aj.sharding.placement(mesh, batch="data", heads="model").spec)
        ('data', None, 'model', None)
    """
    check_names(mesh, batch=batch, heads=heads)
    if batch is not None and batch_axes < 1:
        raise ValueError(f"batch {batch!r} divides a batch axis, and batch_axes is {batch_axes}")
    lead = (batch, *(None,) * (batch_axes - 1)) if batch_axes else ()
    return NamedSharding(mesh, PartitionSpec(*lead, None, heads, None))


def check_names(mesh: Mesh, **axes: AxisNames) -> None:
    """Raises a ValueError unless every name is an axis of the mesh, used once."""
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
