"""Every variable of every public layer, as a checkpoint has it: path, shape and dtype.

The tables beside this file were made once; a layer's variables stay as they are there.
"""

from pathlib import Path

import pytest

from tests.modules.layers_table import FLAVOURS, cache_variables, cases, described, variables

TABLES = Path(__file__).parent / "parameter_trees"


def expected(flavour: str) -> dict[str, list[str]]:
    """The lines of each case, from the files `<flavour>_*.txt`."""
    found: dict[str, list[str]] = {}
    for path in sorted(TABLES.glob(f"{flavour}_*.txt")):
        for block in path.read_text().split("\n\n"):
            name, *lines = block.strip().splitlines()
            found[name.strip("[]")] = lines
    return found


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_there_is_a_table_for_every_layer(flavour):
    al = FLAVOURS[flavour]
    names = set(cases(al))
    assert set(expected(flavour)) == names | {"MultiHeadAttention cache"}
    layers = {name for name, value in vars(al).items() if isinstance(value, type)}
    assert layers == {name.split()[0] for name in names}


@pytest.mark.parametrize("name", list(cases(FLAVOURS["nnx"])))
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_variables_are_those_of_the_table(flavour, name):
    assert described(variables(flavour, name)) == expected(flavour)[name]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_cache_has_the_variables_of_the_table(flavour):
    table = expected(flavour)["MultiHeadAttention cache"]
    assert described(cache_variables(flavour)) == table
