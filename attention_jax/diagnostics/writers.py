"""Writers for the rows of a monitor: JSON lines and TensorBoard."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

from attention_jax.diagnostics.monitor import history


class _Writer:
    """Writes each row of a monitor once."""

    last = -1

    def write(self, state: Any) -> int:
        """Writes the rows that have not been written yet.

        Args:
            state: the state of a monitor, or an optimiser state that contains one.

        Returns:
            The number of rows written.
        """
        rows = [row for row in history(state) if row["step"] > self.last]
        self._append(rows)
        if rows:
            self.last = rows[-1]["step"]
        return len(rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        raise NotImplementedError


class JsonLines(_Writer):
    """Appends the rows of a monitor to a file, one JSON object per line.

    Non-finite numbers are written as null.

    Args:
        path: the file; it and its directory are created if they do not exist. Rows up to the last
            step of an existing file are not written again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        rows = read_history(self.path)
        self.last = rows[-1]["step"] if rows else -1

    def _append(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps(_finite(row), allow_nan=False) + "\n")


class TensorBoard(_Writer):
    """Writes the rows of a monitor as TensorBoard scalars, `path/field`.

    Args:
        directory: the log directory.

    Raises:
        ImportError: tensorboardX is not installed: `pip install 'attention_jax[tensorboard]'`.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            module = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs tensorboardX: pip install 'attention_jax[tensorboard]'"
            ) from error
        self.writer = module.SummaryWriter(str(directory))

    def _append(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "loss" in row:
                self.writer.add_scalar("loss", row["loss"], row["step"])
            for path, fields in row["attention"].items():
                for name, value in fields.items():
                    self.writer.add_scalar(f"{path}/{name}", value, row["step"])
        self.writer.flush()


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """Reads the rows of a file written by `JsonLines`, for `diagnose(history=...)`.

    Args:
        path: the file.

    Returns:
        The rows, as from `history`; non-finite numbers are None.
    """
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
