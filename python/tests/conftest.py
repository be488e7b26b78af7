import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "real_shm: what only the shared-memory backend itself does")


def pytest_collection_modifyitems(items):
    from lockstep_torch import _lockstep_torch

    if _lockstep_torch.backend_name != "shm":
        skip = pytest.mark.skip(reason=f"built with {_lockstep_torch.backend_name} in the place of shm")
        for item in items:
            if item.get_closest_marker("real_shm"):
                item.add_marker(skip)


@pytest.fixture(params=[2, 3])
def world(request):
    return request.param
