"""Most tests of modules run in both flavours."""

import pytest

from tests.modules.flavours import MODULES, Flavour


@pytest.fixture(params=MODULES)
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """NNX and Linen in turn."""
    return Flavour(request.param)
