import pytest


@pytest.fixture(params=["nnx", "linen"])
def flavour(request):
    return request.param
