"""The device mesh of training, and the sharding of arrays.

    data     divides the examples of a batch; with --fully-sharded the parameters too
    model    divides heads, hidden widths and vocabularies

The default is a mesh of one device, with the same code path. Several processes share one mesh: each
makes its rows of a batch, and only the first writes files.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import UsageError

AXES = ("data", "model")

# The first rule whose pattern is found in a leaf's path shards it; an axis that does not divide
# evenly is replicated. Paths of moments end with the paths of their parameters.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(query|key|value)\.kernel", PartitionSpec(None, "model")),  # [D, N, H]
    (r"(query|key|value)\.bias", PartitionSpec("model")),  # [N, H]
    (r"attention\.out\.kernel", PartitionSpec("model")),  # [N, H, D]
    (r"mlp\.hidden\.kernel", PartitionSpec(None, "model")),  # [D, M]
    (r"mlp\.hidden\.bias", PartitionSpec("model")),  # [M]
    (r"mlp\.out\.kernel", PartitionSpec("model")),  # [M, D]
    (r"embedding\.embedding", PartitionSpec("model")),  # [vocab, D]
    (r"output\.kernel", PartitionSpec(None, "model")),  # [D, vocab]
)


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the other processes of a run, before anything is computed.

    Args:
        coordinator: HOST:PORT of the first process; "auto" to take all three from the cluster's
            environment (Slurm, Open MPI, Kubernetes, Cloud TPU); None for a process by itself.
        processes: the number of processes.
        process: the index of this one, from 0.
    """
    if coordinator is None or jax.distributed.is_initialized():
        return
    if coordinator == "auto":
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(coordinator, processes, process)


def leave() -> None:
    """Disconnect from the other processes, all of which call this."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def first() -> bool:
    """Return whether this is the first process, which writes files and prints."""
    return jax.process_index() == 0


def count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def shared(value: Any) -> Any:
    """Return the first process's ``value``, a number or an array."""
    if count() == 1:
        return value
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(np.asarray(value))


def any_process(value: bool) -> bool:
    """Return whether ``value`` is true in any process; all call this at the same step."""
    if count() == 1:
        return value
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(value)).any())


def barrier(name: str) -> None:
    """Wait until all processes reach this call."""
    if count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def parse(text: str | None) -> dict[str, int]:
    """Return the sizes of ``AXIS=SIZE,...``, 1 for an axis that is not named.

    Example:
        >>> parse("data=4,model=2")
        {'data': 4, 'model': 2}
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(",") if text else ():
        axis, _, size = part.partition("=")
        if axis not in AXES or not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise UsageError(f"--mesh {text!r} must be as data=4,model=2")
        sizes[axis] = int(size)
    return sizes


def make(text: str | None) -> Mesh:
    """Return the mesh of `parse`; None is one device, or all on one axis for several processes."""
    sizes, devices = parse(text), jax.devices()
    if text is None and count() > 1:
        sizes["data"] = len(devices)
    wanted = math.prod(sizes.values())
    if wanted > len(devices) or (count() > 1 and wanted != len(devices)):
        raise UsageError(f"--mesh {text} has {wanted} devices, and there are {len(devices)}")
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, kinds, devices=devices[:wanted])


def sharding(mesh: Mesh, path: str, shape: tuple[int, ...], *, fully: bool) -> NamedSharding:
    """Return the sharding of a leaf of the state.

    Args:
        mesh: of `make`.
        path: of the leaf, its names separated by dots.
        shape: of the leaf.
        fully: whether its longest unsharded axis is sharded over ``data``.
    """
    found = (spec for pattern, spec in RULES if re.search(pattern, path))
    spec = [*next(found, ())][: len(shape)]
    spec += [None] * (len(shape) - len(spec))
    spec = [a if a and n % mesh.shape[a] == 0 else None for a, n in zip(spec, shape, strict=True)]
    whole = [i for i, a in enumerate(spec) if a is None and shape[i] % mesh.shape["data"] == 0]
    if fully and whole:
        spec[max(whole, key=lambda i: shape[i])] = "data"
    return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(mesh: Mesh, tree: Any, *, fully: bool) -> Any:
    """Return `sharding` of each leaf of a tree."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return sharding(mesh, name, np.shape(leaf), fully=fully)

    return jax.tree_util.tree_map_with_path(one, tree)


def put(tree: Any, where: Any) -> Any:
    """Place the arrays of a tree, equal in all processes, by their shardings."""

    def one(leaf: Any, at: NamedSharding) -> jax.Array:
        if count() == 1 or not getattr(leaf, "is_fully_addressable", True):
            return jax.device_put(leaf, at, may_alias=False)  # the steps write into it
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(leaf), at))
        return jax.make_array_from_callback(np.shape(leaf), at, lambda i: np.array(leaf[i]))

    return jax.tree.map(one, tree, where)


def place(mesh: Mesh, batch: Any) -> Any:
    """Return a batch with its examples sharded over ``data``; each process makes its rows.

    A leaf is an array, or has ``shape`` and gives the rows of an index. One whose examples do not
    divide evenly is copied to every device.
    """

    def one(leaf: Any) -> jax.Array:
        shape = np.shape(leaf) if not hasattr(leaf, "shape") else leaf.shape
        even = bool(shape) and shape[0] % mesh.shape["data"] == 0
        at = NamedSharding(mesh, PartitionSpec("data") if even else PartitionSpec())
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, at)
        return jax.make_array_from_callback(shape, at, functools.partial(_rows, leaf))

    return jax.tree.map(one, batch)


def _rows(leaf: Any, index: Any) -> np.ndarray:
    return np.asarray(leaf[index])


def check_batch(mesh: Mesh, batch: Any) -> None:
    """Raise UsageError unless the examples of a training batch divide over ``data``."""
    size = mesh.shape["data"]
    for leaf in jax.tree.leaves(batch):
        if np.shape(leaf) and np.shape(leaf)[0] % size:
            raise UsageError(
                f"a batch of {np.shape(leaf)[0]} examples does not divide over --mesh data={size}; "
                "choose a --batch-size that is a multiple of it"
            )


def of(tree: Any) -> Mesh | None:
    """Return the mesh of the arrays of a tree, or None."""
    for leaf in jax.tree.leaves(tree):
        found = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(found, Mesh):
            return found
    return None


def gathered(tree: Any) -> Any:
    """Return the arrays of a tree, whole, on this process's first device."""
    mesh = of(tree)
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    copied = jax.jit(lambda x: x, out_shardings=whole)(tree)
    device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x.addressable_data(0), device), copied)
