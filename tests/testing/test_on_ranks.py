"""What a test on ranks finds: these tests run on ranks themselves."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

import gpucoll
from gpucoll import config


@pytest.mark.ranks(4)
def test_ranks_share_a_communicator_and_a_folder(comm, tmp_path):
    (tmp_path / f"rank{comm.rank}").write_text(str(os.getpid()))
    assert comm.all_reduce(comm.rank) == 6
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 4


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [1, 1000])
def test_numbers_of_ranks_are_parameters(comm, count, request):
    assert f"ranks={comm.world_size}" in request.node.name
    assert comm.all_reduce(np.ones(count)).tolist() == [comm.world_size] * count


@pytest.mark.ranks(2)
def test_the_code_under_test_may_call_init_itself():
    for _ in range(2):
        with gpucoll.init() as mine:
            assert mine.all_reduce(1) == 2


@pytest.mark.ranks(3)
def test_though_some_ranks_called_it_more_often_before():
    with gpucoll.init() as mine:
        assert mine.all_reduce(1) == 3


@pytest.mark.ranks(2, timeout_s=30)
def test_the_environment_of_a_rank():
    assert os.environ[config.CPU_ONLY] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert config.timeout_s() == 15


@pytest.mark.ranks(2)
def test_fixtures_of_pytest_act_in_the_rank(comm, monkeypatch, capsys, caplog, recwarn):
    monkeypatch.setenv("NUMBER", str(comm.rank))
    print("number", os.environ["NUMBER"])
    assert capsys.readouterr().out == f"number {comm.rank}\n"
    warnings.warn("careful", stacklevel=1)
    assert str(recwarn.pop().message) == "careful"
    assert comm.all_gather_object(len(caplog.records)) == [0, 0]


@pytest.mark.ranks(2)
def test_descriptors_can_be_captured(capfd):
    os.write(1, b"directly")
    assert capfd.readouterr().out == "directly"


@pytest.mark.ranks(2)
def test_errors_are_expected_as_anywhere(comm):
    with pytest.raises(gpucoll.MismatchError):
        comm.all_reduce(np.ones(comm.rank + 1))
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
class TestInAClass:
    @pytest.fixture
    def total(self, comm):
        return comm.all_reduce(comm.rank + 1)

    def test_the_marker_may_stand_on_it(self, total):
        assert total == 3

    @pytest.mark.ranks(3)
    def test_and_the_closest_one_holds(self, total):
        assert total == 6
