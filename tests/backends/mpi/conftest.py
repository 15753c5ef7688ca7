from __future__ import annotations

import pytest
from tests import mpis


@pytest.fixture(params=mpis.FOLDERS)
def mpi(request):
    """An MPI with its mpi4py."""
    found = mpis.installed(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed (see GPUCOLL_TEST_MPI in tests/README.md)")
    return found
