"""The plugin in other projects: runs of pytest inside."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import gpucoll

pytest_plugins = "pytester"


def test_no_array_library_is_loaded_before_a_test_does(inner):
    result = inner(
        test_modules="""
            import sys
            import pytest

            @pytest.mark.ranks(2)
            def test_modules(comm):
                assert comm.all_reduce(1) == 2
                assert not {"cupy", "torch", "jax"} & set(sys.modules)
            """
    )

    result.assert_outcomes(passed=1)


def test_fixtures_of_every_scope_live_in_the_ranks(inner, pytester):
    result = inner(
        conftest="""
            import os, pytest

            @pytest.fixture(scope="session")
            def log():
                lines = []
                yield lines
                with open(f"log-{os.environ.get('GPUCOLL_RANK', 'alone')}", "w") as file:
                    file.write(" ".join(lines))

            @pytest.fixture(scope="module", autouse=True)
            def of_module(request, log):
                log.append("+" + request.module.__name__)
                yield
                log.append("-" + request.module.__name__)

            @pytest.fixture(params=["x", "y"])
            def letter(request):
                return request.param
            """,
        test_a="""
            import pytest

            @pytest.mark.ranks(3)
            def test_letters(comm, letter):
                assert comm.all_gather_object(letter) == [letter] * 3

            def test_without_ranks(log):
                assert log == ["+test_a"]

            @pytest.mark.ranks(2)
            def test_again(log):
                assert log == ["+test_a"]
            """,
        test_b="""
            import pytest

            def test_before(log):
                assert log == ["+test_a", "-test_a", "+test_b"]

            @pytest.mark.ranks(3)
            def test_last(log):
                assert log == ["+test_a", "-test_a", "+test_b"]
            """,
    )

    result.assert_outcomes(passed=6)
    for who in ("0", "1", "2", "alone"):
        assert (pytester.path / f"log-{who}").read_text() == "+test_a -test_a +test_b -test_b"


OUTCOMES = """
    import unittest
    import warnings
    import gpucoll
    import pytest

    @pytest.mark.ranks(2)
    def test_passes(comm):
        warnings.warn("careful with this")

    @pytest.mark.ranks(2)
    def test_skips():
        pytest.skip("not today")

    @pytest.mark.ranks(2)
    def test_needs():
        pytest.importorskip("no_such_module")

    @pytest.mark.ranks(2)
    @pytest.mark.skipif(True, reason="by its marker")
    def test_skipped_by_marker(comm): ...

    @pytest.mark.ranks(2)
    def test_skips_on_one_rank(comm):
        if comm.rank == 1:
            pytest.skip("not on this one")
        comm.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_fails_as_expected_on_one_rank(comm):
        assert comm.rank == 0
        comm.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=KeyError)
    def test_fails_otherwise_than_expected(comm):
        raise ValueError

    @pytest.mark.ranks(2)
    @pytest.mark.xfail
    def test_passes_unexpectedly(comm): ...

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_passes_unexpectedly_strictly(comm): ...

    @pytest.fixture
    def broken(comm):
        yield
        assert comm.rank == 0

    @pytest.mark.ranks(2)
    def test_teardown_fails(broken): ...

    @pytest.mark.ranks(2)
    def test_setup_fails(no_such_fixture): ...

    class TestOfUnittest(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_passes(self):
            with gpucoll.init() as comm:
                self.assertEqual(comm.all_reduce(1), 2)

        @pytest.mark.ranks(2, 3)
        def test_cannot_have_parameters(self): ...

    def test_without_ranks(comm): ...
    """


def test_outcomes(inner):
    result = inner("-rA", test_it=OUTCOMES)

    result.assert_outcomes(
        passed=3, skipped=3, failed=4, xfailed=1, xpassed=1, errors=3, warnings=1
    )
    lines = [
        "skipped on rank 1 of 2 (not on this one), but not on rank 0: *",
        "FAILED *skips_on_one_rank - skipped on rank 1 of 2*",
        "FAILED *fails_otherwise_than_expected - ranks 0-1: ValueError",
        "FAILED *test_passes_unexpectedly_strictly - ranks 0-1: *XPASS*",
        "FAILED *cannot_have_parameters - *give a single number of ranks*",
        "ERROR *test_teardown_fails - rank 1: assert 1 == 0",
        "ERROR *test_setup_fails - ranks 0-1: fixture *no_such_fixture* not found*",
        "ERROR *test_without_ranks - *the fixture comm needs *",
        "*UserWarning: careful with this",
    ]
    for line in lines:
        result.stdout.fnmatch_lines([line])
    assert str(result.stdout).count("UserWarning: careful with this") == 1


def test_a_wrong_marker_fails_its_own_test(inner):
    result = inner(
        test_it="""
            import pytest

            @pytest.mark.ranks
            def test_none(comm): ...

            @pytest.mark.ranks(2, timeout=3)
            def test_misspelled(comm): ...

            @pytest.mark.ranks("4")
            def test_text(comm): ...

            @pytest.mark.ranks(2, timeout_s="3")
            def test_time(comm): ...

            @pytest.mark.ranks(2)
            def test_right(comm): ...

            @pytest.mark.ranks(2, 0)
            @pytest.mark.parametrize("value", [1, 2])
            def test_last(comm, value): ...
            """
    )

    result.assert_outcomes(passed=1, failed=6)
    for name, given in (
        ("none", ""),
        ("misspelled", "2, timeout=3"),
        ("text", "'4'"),
        ("time", "2, timeout_s='3'"),
        ("last[[]1]", "2, 0"),
        ("last[[]2]", "2, 0"),
    ):
        result.stdout.fnmatch_lines([f"*__ test_{name} __*", f"*got ranks({given})"])


def test_a_project_without_ranks_is_not_disturbed(inner):
    result = inner(
        "--strict-markers",
        test_it="""
            import sys
            import pytest

            @pytest.fixture
            def comm():
                return "the project's own"

            def test_nothing_is_loaded(comm):
                assert comm == "the project's own"
                heavy = {"numpy", "numba", "cloudpickle", "gpucoll.testing.driver"}
                assert not heavy & set(sys.modules)
            """,
    )

    result.assert_outcomes(passed=1)


@pytest.fixture
def installed(pytester, monkeypatch):
    """Install gpucoll, as pytest sees it: its files listed, and its entry point."""
    site = pytester.mkdir("installed")
    (site / "gpucoll").symlink_to(Path(gpucoll.__file__).parent)
    about = site / "gpucoll-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: gpucoll\nVersion: 1\n")
    (about / "RECORD").write_text("gpucoll/__init__.py,,\n")
    (about / "entry_points.txt").write_text("[pytest11]\ngpucoll = gpucoll.testing\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("named", [[], ["-p", "gpucoll.testing.plugin"]])
@pytest.mark.usefixtures("installed")
def test_an_installed_plugin_is_found_and_may_be_named_as_well(pytester, named):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ranks(2, 3)
        def test_it(comm): ...
        """
    )

    result = pytester.runpytest_subprocess("--strict-markers", "--collect-only", "-q", *named)

    result.stdout.fnmatch_lines(["*::test_it?ranks=2?", "*::test_it?ranks=3?"])


@pytest.mark.usefixtures("installed")
def test_asserts_of_gpucolls_own_modules_are_not_rewritten(pytester):
    pytester.makepyfile(
        """
        import sys
        from importlib.machinery import SourceFileLoader

        import gpucoll.api.initialise
        import gpucoll.api.communicator

        # What pytest loads in order to find the plugin: parsed, but not rewritten.
        TO_FIND_IT = {"gpucoll", "gpucoll.version", "gpucoll.testing"}

        def test_loaders():
            modules = {name: one for name, one in sys.modules.items() if name.startswith("gpucoll")}
            others = {
                name
                for name, module in modules.items()
                if not isinstance(module.__loader__, SourceFileLoader)
            }
            assert "gpucoll.testing.plugin" in modules
            assert others <= TO_FIND_IT
        """
    )

    result = pytester.runpytest_subprocess()

    result.assert_outcomes(passed=1)


@pytest.mark.usefixtures("installed")
def test_pytest_does_not_warn_of_gpucoll_that_was_loaded_before(pytester):
    pytester.makepyfile("def test_it(): ...")
    program = "import sys, gpucoll.testing.plugin, pytest; sys.exit(pytest.main(['-W', 'error']))"

    result = pytester.run(sys.executable, "-c", program)

    result.assert_outcomes(passed=1)
    assert "cannot be rewritten" not in str(result.stdout) + str(result.stderr)


def test_output_is_shown_by_rank_and_equal_output_once(inner):
    result = inner(
        test_it="""
            import os, sys
            import pytest

            @pytest.mark.ranks(3)
            def test_it(comm):
                print("out of", comm.rank)
                os.write(2, b"the same")
                assert False
            """
    )

    result.stdout.fnmatch_lines(
        [
            "*Captured stderr of ranks 0-2 *",
            "the same*",
            "*Captured stdout of rank 0 *",
            "out of 0",
            "*Captured stdout of rank 1 *",
            "out of 1",
            "*Captured stdout of rank 2 *",
            "out of 2",
        ]
    )


def test_output_goes_to_the_terminal_with_s(inner):
    result = inner(
        "-s",
        test_it="""
            import pytest

            @pytest.mark.ranks(2)
            def test_it(comm):
                print("out of", comm.rank)
            """,
    )

    result.stdout.fnmatch_lines_random(["*out of 0", "*out of 1"])


def test_ranks_find_what_pytest_finds_and_join_no_job(inner, pytester, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPUCOLL_RANK"):
        monkeypatch.setenv(name, "1")
    (pytester.path / "elsewhere").mkdir()
    (pytester.path / "elsewhere" / "found_there.py").write_text("value = 3")
    result = inner(
        conftest="import sys; sys.path.append('elsewhere')",
        test_it=f"""
            import sys
            import pytest
            import found_there

            @pytest.mark.ranks(2)
            def test_it(comm):
                assert found_there.value == 3
                assert sys.executable == {sys.executable!r}
                assert comm.all_reduce(1) == 2
            """,
    )

    result.assert_outcomes(passed=1)


WORKS_LONG = """
    from gpucoll import progress

    def test_long():
        print("captured")
        progress.show("gpucoll: compiling", False)
        progress.show("gpucoll: compiled", True)

    def test_afterwards():
        pass
    """


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n1")])
def test_what_takes_long_shows_itself(inner, arguments):
    result = inner(*arguments, test_long=WORKS_LONG)

    result.assert_outcomes(passed=2)
    lines = [line for line in result.errlines if line]
    assert lines == ["gpucoll: compiling", "gpucoll: compiled"]
    assert "captured" not in result.stdout.str()
