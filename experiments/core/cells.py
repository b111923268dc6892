"""The cell of a model that is trained."""

from collections.abc import Callable
from typing import Any


def trained(
    folder: Any, progress: Any, key: str, steps: int, train: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the finished cell ``key`` of a run's folder, training the model if it is not there.

    A cell that is there counts as ``steps`` in the progress; its checkpoints are deleted.
    """
    if folder.has(key):
        progress.skip(steps)
    cell = folder.cell(key, train)
    folder.drop_checkpoints(key)
    return cell
