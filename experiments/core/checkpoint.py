"""Checkpoints of a training state, with checksums that detect damage.

    FOLDER/STEP/state             the arrays by their paths (orbax)
    FOLDER/STEP/checkpoint.json   a record in JSON, and the SHA-256 of every file of the state

A checkpoint is written asynchronously to a temporary folder and then renamed, so that a kill leaves
a complete one or none; the two newest are kept. Every process writes its arrays, and the first one
the rest. A checkpoint can be restored to any mesh.
"""

import contextlib
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments import files
from experiments.core import mesh

_KEPT = 2
_RECORD = "checkpoint.json"
_POOL = ThreadPoolExecutor(1)


class Restored(NamedTuple):
    """A restored checkpoint: its step, its state and its record."""

    step: int
    state: Any
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training, in one folder; leaving the context awaits the last save."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Start saving ``state`` and ``record`` as the checkpoint of ``step``.

        An error of the previous save is raised here; the state may be donated immediately.
        """
        self.wait()
        part = self._folder / f"{step}.part"
        with self._discarding(part):
            if mesh.first():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            mesh.barrier(f"checkpoint {part}")
            _checkpointer().save(part / "state", args=ocp.args.PyTreeSave(_flat(state)))
        self._pending = _POOL.submit(self._seal, step, record)

    def wait(self) -> None:
        """Wait for the last save, and raise its error if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore(
        self, like: Any, fault: Callable[[dict[str, Any]], str | None], say: Callable[[str], None]
    ) -> Restored | None:
        """Return the newest undamaged checkpoint, or None.

        Args:
            like: a state of the same structure, shapes and dtypes, with the shardings to read onto.
            fault: returns the error of a record, or None.
            say: is called with a message for each damaged checkpoint, which is not changed.
        """
        steps = _steps(self._folder)
        for index, step in enumerate(steps):
            place = self._folder / str(step)
            record, wrong = _read(place)
            wrong = wrong or fault(record)
            if wrong is None:
                return Restored(step, _load(place / "state", like), record)
            older = steps[index + 1 :]
            instead = f"trying the one of step {older[0]}" if older else "starting from step 0"
            say(f"the checkpoint {files.short(place)} is damaged ({wrong}): {instead}")
        return None

    def _seal(self, step: int, record: dict[str, Any]) -> None:
        place, part = self._folder / str(step), self._folder / f"{step}.part"
        with self._discarding(part):
            _checkpointer().wait_until_finished()
            if not mesh.first():
                return
            content = {"step": step, "sha256": _digest(json.dumps(record).encode())}
            content |= {"record": record, "files": _digests(part / "state")}
            files.write_whole(part / _RECORD, json.dumps(content))
            if place.exists():  # a damaged one, whose step was trained again
                shutil.rmtree(place)
            part.rename(place)
        for old in _steps(self._folder)[_KEPT:]:
            shutil.rmtree(self._folder / str(old), ignore_errors=True)

    @contextlib.contextmanager
    def _discarding(self, part: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@functools.cache
def _checkpointer() -> ocp.AsyncCheckpointer:
    # It logs an error, such as a full disk, before raising it.
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)
    # Merging OCDBT files uses a glob pattern, which a bracket in a folder's name breaks.
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))


def _flat(state: Any) -> dict[str, Any]:
    """Return the arrays of a state by their paths, PRNG keys as numbers."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in leaves
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _load(folder: Path, like: Any) -> Any:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
    arguments = ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
    )
    found = _checkpointer().restore(folder, args=arguments)
    leaves, structure = jax.tree.flatten(like)
    read = [
        jax.random.wrap_key_data(value) if _is_key(leaf) else value
        for leaf, value in zip(leaves, (found[name] for name in _flat(like)), strict=True)
    ]
    return jax.tree.unflatten(structure, read)


def _steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(path.name) for path in found if path.name.isdigit()), reverse=True)


def _read(place: Path) -> tuple[dict[str, Any], str | None]:
    """Return the record of a checkpoint, and the error of its files or None."""
    try:
        content = files.read_json(place / _RECORD)
        wanted, record = content["files"], content["record"]
        if content["sha256"] != _digest(json.dumps(record).encode()):
            return {}, f"{_RECORD} has changed"
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"no whole {_RECORD}"
    there = _digests(place / "state")
    changed = sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )
    return record, f"state/{changed[0]} has changed" if changed else None


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by its path in it."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as content:
                name = file.relative_to(folder).as_posix()
                found[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
