"""Where a monitor's rows go: a file of JSON lines, and TensorBoard's."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

from attention_jax.diagnostics.training import history


class JsonLines:
    """Appends a monitor's new rows to a file, one JSON object a line.

    What is not finite is written as null, which JSON has a word for.

    Args:
        path: the file; it and its folder are made where they are not there. An existing file is
            gone on with: rows up to its last step are not written again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        rows = read_history(self.path)
        self.last = rows[-1]["step"] if rows else -1

    def write(self, state: Any) -> int:
        """Appends the rows that are not there yet.

        Args:
            state: the monitor's state, or an optimiser's state with one in it.

        Returns:
            How many rows were written.
        """
        rows = [row for row in history(state) if row["step"] > self.last]
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        if rows:
            self.last = rows[-1]["step"]
        return len(rows)


class TensorBoard:
    """Writes a monitor's new rows as TensorBoard scalars, `path/field`.

    Args:
        directory: TensorBoard's log directory.

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
        self.last = -1

    def write(self, state: Any) -> int:
        """Writes the rows that are not there yet.

        Args:
            state: the monitor's state, or an optimiser's state with one in it.

        Returns:
            How many rows were written.
        """
        rows = [row for row in history(state) if row["step"] > self.last]
        for row in rows:
            if "loss" in row:
                self.writer.add_scalar("loss", row["loss"], row["step"])
            for path, fields in row["attention"].items():
                for name, value in fields.items():
                    self.writer.add_scalar(f"{path}/{name}", value, row["step"])
        self.writer.flush()
        if rows:
            self.last = rows[-1]["step"]
        return len(rows)


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file that `JsonLines` wrote, for `diagnose(history=...)`.

    Args:
        path: the file.

    Returns:
        The rows, as `history` gives them; what was not finite is None.
    """
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
