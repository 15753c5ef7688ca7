"""What tests of several examples need."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn's digits")
    data = datasets.load_digits()
    return data.data / 16, data.target
