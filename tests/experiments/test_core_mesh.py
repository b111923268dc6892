"""How arrays lie on a mesh, by rule; and what the progress says of speed."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from experiments.core import measure, mesh
from experiments.errors import UsageError

WIDE = AbstractMesh((4, 2), ("data", "model"))
LAYER = "params.decoder.layers.0"
QUERY = f"{LAYER}.self_attention.query.kernel.value"
MOMENT = f"optimizer.1.mu.{QUERY}"


@pytest.mark.parametrize(
    ("path", "shape", "spec", "fully"),
    [
        (QUERY, (64, 4, 16), (None, "model", None), ("data", "model", None)),
        (MOMENT, (64, 4, 16), (None, "model", None), ("data", "model", None)),
        (QUERY, (64, 3, 16), (None, None, None), ("data", None, None)),  # three heads stay whole
        (QUERY, (62, 4, 15), (None, "model", None), (None, "model", None)),
        (f"{LAYER}.mlp.hidden.kernel.value", (6, 8), (None, "model"), (None, "model")),
        (f"{LAYER}.mlp.out.kernel.value", (8, 12), ("model", None), ("model", "data")),
        ("params.embedding.embedding.value", (99, 64), (None, None), (None, "data")),
        ("params.decoder.norm.scale.value", (64,), (None,), ("data",)),
        ("step", (), (), ()),
    ],
)  # fmt: skip
def test_a_leaf_is_divided_by_the_rule_of_its_path(path, shape, spec, fully):
    assert mesh.sharding(WIDE, path, shape, fully=False).spec == PartitionSpec(*spec)
    assert mesh.sharding(WIDE, path, shape, fully=True).spec == PartitionSpec(*fully)


def test_the_default_is_a_mesh_of_one_device():
    assert dict(mesh.make(None).shape) == {"data": 1, "model": 1}
    assert mesh.parse("model=2") == {"data": 1, "model": 2}
    for text in ("data", "data=0", "data=-1", "data=2,rows=2", "data=2;model=2"):
        with pytest.raises(UsageError, match="data=4,model=2"):
            mesh.parse(text)


def test_a_batch_keeps_its_numbers_and_makes_rows_when_asked():
    made = []

    class Rows:
        shape = (6, 2)

        def __getitem__(self, index):
            made.append(index)
            return np.arange(12).reshape(6, 2)[index]

    placed = mesh.place(mesh.make(None), {"a": np.ones((3, 2)), "rows": Rows(), "n": np.int32(4)})
    np.testing.assert_array_equal(placed["rows"], np.arange(12).reshape(6, 2))
    assert len(made) == 1
    assert placed["n"] == 4


def test_a_training_batch_that_does_not_divide_is_refused():
    mesh.check_batch(WIDE, {"a": np.ones((8, 3)), "n": np.int32(3)})
    with pytest.raises(UsageError, match=r"6 examples .* --mesh data=4; choose a --batch-size"):
        mesh.check_batch(WIDE, {"a": np.ones((6, 3))})


def test_the_share_of_the_peak_is_said_where_it_is_known(monkeypatch):
    class Executable:
        def cost_analysis(self):
            return {"flops": 2e9}

    assert measure.speed(Executable(), 0.1, 0) == ""
    assert measure.speed(Executable(), 0.1, 12345.6) == ", 12,346 tokens/s"
    monkeypatch.setitem(measure._PEAKS, "cpu", 1e11)
    assert measure.speed(Executable(), 0.1, 1.0) == ", 1 tokens/s, 20% of peak"
