"""Seeded faults: where they can be, how runs with them end, and who caught them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutation_cache  # noqa: E402
import mutation_faults  # noqa: E402
import mutation_runs  # noqa: E402
import mutations  # noqa: E402
from mutation_faults import KINDS, Fault, MissingError, mutated  # noqa: E402
from mutation_runs import Ran, Tree  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

ERRORS = {"GpucollError": set(), "ArgumentError": {"GpucollError"}, "StateError": {"GpucollError"}}
HEAD = "from gpucoll.errors import ArgumentError, StateError\n"


def changes(body: str, kind: str = "", head: str = "def f(self, rank: int, root: int, x, n):"):
    """Return the changed lines of a function with this body."""
    text = f"{HEAD}{head}\n    {body}\n"
    found = mutation_faults.faults_of("a.py", text, ERRORS)
    return {" ".join(each.new.replace("\\", "").split()) for each in found if kind in each.kind}


class TestPlaces:
    @pytest.mark.parametrize(
        ("kind", "body", "expected"),
        [
            ("flipped comparison", "return 0 < n", {"return 0 <= n"}),
            ("flipped comparison", "return x == n", {"return x != n"}),
            ("dropped wait", "self.wait_all(\n        x\n    )", {"pass"}),
            ("dropped wait", "return ', '.join(x)", set()),
            ("wrong rank", "return x(root)", {"return x(0)", "return x(rank)"}),
            ("wrong rank", "return self.rank, self.world_size",
             {"return ((self.rank + 1) % self.world_size), self.world_size"}),
            ("off by one", "return x[:n]", {"return x[:n + 1]", "return x[:n - 1]"}),
            ("off by one", "return n + 3", {"return n + 4", "return n + 2"}),
            ("skipped check", "if x:\n        raise ArgumentError", {"if False:"}),
            ("skipped check", "self._check_open()", {"pass"}),
            ("wrong error", "raise ArgumentError(n < 1)", {"raise StateError(n < 1)"}),
        ],
    )  # fmt: skip
    def test_each_kind(self, kind, body, expected):
        assert changes(body, kind) == expected

    def test_compiled_loops(self):
        head = "_LOST, OK = 1, 0\n@inline\ndef loop(context, rank):"
        assert changes("status = wait(rank)", "dropped", head) == {"status = 0"}
        assert changes("return _LOST", "error", head) == {"return OK"}
        assert changes("if status != OK:\n        return status", "check", head) == {"if False:"}

    @pytest.mark.parametrize(
        "body",
        [
            *('"1 < 2"', "return f'{n < 1}'", "assert n < 1", "say(n < 1)"),
            *("raise ValueError(n + 1)", "if TYPE_CHECKING:\n        n + 1"),
            *("os.kill(n + 1, 9)", "return time.monotonic() + 1"),
        ],
    )
    def test_left_out(self, body):
        assert not changes(body)
        assert not changes("return n + 1", head="def __repr__(self, n):")

    def test_a_drawn_list(self, tmp_path):
        for folder in (*mutation_faults.FOLDERS, "src/gpucoll/calls"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            functions = [f"def f{n}(x, n):\n    return x[: n + {n}]\n" for n in range(5)]
            (tmp_path / folder / "a.py").write_text("\n".join(functions))
        (tmp_path / "src/gpucoll/errors.py").write_text("class GpucollError(Exception): ...\n")
        drawn = mutation_faults.draw(tmp_path, 9, seed=1)
        assert (
            drawn
            == mutation_faults.draw(tmp_path, 9, seed=1)
            != mutation_faults.draw(tmp_path, 9, 2)
        )
        assert len({(each.file, each.function) for each in drawn}) == 9
        assert len({each.file for each in drawn}) == 4
        assert len(mutation_faults.draw(tmp_path, 99, 1)) == 4 * mutation_faults.MOST_PER_FILE


class TestPutting:
    FAULT = Fault("off by one", "a.py", 2, "C.f", "        x = 1", "        x = 2", 1)
    TEXT = "class C:\n    def f(self):\n        x = 1\n        y = 0\n        x = 1\n"

    def test_found_again_after_the_code_has_moved(self):
        assert mutated(f"\n\n{self.TEXT}", self.FAULT).endswith("y = 0\n        x = 2\n")

    @pytest.mark.parametrize("text", [TEXT.replace("x = 1", "x = 3"), TEXT.replace("f(", "g("), ""])
    def test_gone(self, text):
        with pytest.raises(MissingError, match=r"a\.py:2 is no longer `x = 1`"):
            mutated(text, self.FAULT)

    def test_what_a_loop_is_compiled_from(self):
        def parts(limit, text="def f(x):\n    return g(x)\ndef g(x):\n    return x < LIMIT"):
            names = {"LIMIT": limit, "__name__": "m"}
            exec(compile(text, "a.py", "exec"), names)  # noqa: S102
            return "\n".join(mutation_cache._parts(names["f"], set()))

        assert parts(1) == parts(1) != parts(2)
        assert parts(1) != parts(1, "def f(x):\n    return g(x)\ndef g(x):\n    return x <= LIMIT")


@pytest.fixture
def tree(tmp_path):
    source, place = tmp_path / "source", tmp_path / "tree"
    (source / "tools").mkdir(parents=True)
    (source / "tools/link_tree.py").write_text("")
    (source / "a.py").write_text(TestPutting.TEXT)
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    place.mkdir()
    return Tree(source, place, test_limit_s=5.0)


class TestTrees:
    def test_faults_are_taken_out_again(self, tree):
        tree.put([TestPutting.FAULT])
        assert "x = 2" in (tree.root / "a.py").read_text()
        tree.put([])
        assert (tree.root / "a.py").read_text() == TestPutting.TEXT

    @pytest.mark.parametrize(
        ("limit_s", "silence_s", "why"), [(0.3, 9, "limit"), (9, 0.3, "silent")]
    )
    def test_a_run_ends_with_all_its_processes(self, tree, limit_s, silence_s, why):
        program = (
            "import subprocess, time\n"
            "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        ran = tree._run(["-S", "-c", program], limit_s, silence_s)
        assert (ran.code, ran.stopped) == (-9, why)
        status = Path(f"/proc/{int(tree.output)}/stat")
        assert not status.exists() or " Z " in status.read_text()

    def test_nearest_tests(self, tmp_path):
        for name, text in {
            "tests/group/test_b.py": "",
            "tests/group/test_records.py": "",
            "tests/api/test_records.py": "",
            "tests/api/test_c.py": "from gpucoll.group import (\n    links,\n    records,\n)",
            "tests/api/test_d.py": "from gpucoll.group import records_of",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        found = mutation_runs.nearest_tests(tmp_path, "src/gpucoll/group/records.py")
        names = ["group/test_records", "api/test_c", "group/test_b"]
        assert found == [f"tests/{name}.py" for name in names]

    def test_verdicts(self):
        assert Ran(stopped="limit").is_sound
        assert not Ran(stopped="silent").is_sound
        assert Ran(stopped="silent", running=["a"]).verdict == ("timeout", "a")
        assert Ran(4).verdict == ("start", "")
        assert Ran(1, failed=[("test", "a"), ("timeout", "b")]).verdict == ("test", "a")


class PlayedTree:
    """Has tests that catch faults, by the faults' functions; ``unsound`` fails by itself."""

    root = ROOT

    def __init__(self, catches: dict[str, str]) -> None:
        self._catches = catches
        self._faults: set[str] = set()

    def put(self, faults):
        self._faults = {fault.function for fault in faults}

    def fill_cache(self, base=None):
        return True

    def pytest(self, arguments, limit_s, leave_out=()):
        named = [each for each in arguments if each in self._catches]
        for test, function in self._catches.items():
            runs = test in (named or self._catches) and test not in leave_out
            if runs and (function in self._faults or test == "unsound"):
                return Ran(1, failed=[("test", test)])
        return Ran()


@pytest.fixture
def played(tmp_path, monkeypatch):
    faults = [Fault(kind, "a.py", 1, f"f{n}", "old", "new", 0) for n, kind in enumerate(KINDS)]
    catches = {"unsound": "", "near": "f0", "far": "f2", "further": "f4"}
    monkeypatch.setattr(mutations, "Tree", lambda *_: PlayedTree(catches))
    monkeypatch.setattr(mutations, "nearest_tests", lambda *_: ["near"])
    limits = {"limit_s": 1, "test_limit_s": 1, "tier_limit_s": 1}
    options = argparse.Namespace(
        tier="quick",
        jobs=1,
        pytest_arguments="",
        first=None,
        tree=ROOT,
        only_nearest=False,
        **limits,
    )
    results = mutations.Results(tmp_path / "results.json", faults)
    (tmp_path / "work").mkdir()
    return mutations.Campaign(options, results, tmp_path / "work"), results


def test_each_fault_is_caught_by_its_test_or_survives(played, tmp_path):
    campaign, results = played
    campaign.run()
    noted = [results.outcomes[str(n)]["quick"] for n in range(6)]
    assert [each["by"] for each in noted] == ["near", "", "far", "", "further", ""]
    assert [each["outcome"] for each in noted] == ["test", "survived"] * 3
    assert results.failing == {"quick": ["unsound"]}
    again = mutations.Results(tmp_path / "results.json", ())
    assert again.outcomes == results.outcomes
    assert [again.outcome(fault, "all") for fault in again.faults] == ["test", ""] * 3
    lines = list(mutations.report(again))
    assert "| all kinds | 6 | 3 of 6 (50 %) | 0 |" in lines
    assert "\nquick: 3 survived" in lines


def test_processes_without_the_mark_stay():
    with subprocess.Popen(["sleep", "60"], env={**os.environ, mutation_runs.MARK: "a"}) as process:
        mutation_runs.end_all("b")
        assert process.poll() is None
        mutation_runs.end_all("a")
        assert process.wait(5) == -9
