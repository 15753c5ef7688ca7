"""Where compiled loops are kept, under which name, and who compiles them when."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_layers import ROOT

from gpucoll import config, progress
from gpucoll.backends import precompile
from gpucoll.kernels.cpu import cache, cache_key
from gpucoll.kernels.cpu.cache_key import COMPILED_FOLDERS
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.terminal import ERASE_LINE

CPUINFO = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: A Processor
cpu MHz\t\t: {mhz}
core id\t\t: {core}
flags\t\t: fpu sse2 {flag}
bogomips\t: 5000.0{core}

processor\t: 1
flags\t\t: fpu sse2 other
"""


class TestKey:
    NAME = "from gpucoll.kernels.cpu.cache_key import key; print(key())"

    def name(self, path, **environment):
        done = subprocess.run(
            [sys.executable, "-c", self.NAME],
            env={**os.environ, "PYTHONPATH": str(path), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    @pytest.fixture
    def copy(self, tmp_path):
        """Copy what takes part to another place, with files of another age: another environment."""
        package = Path(config.__file__).parent
        for name in (
            "__init__",
            "blocks",
            "codes",
            "collectives",
            "config",
            "errors",
            "function_digest",
            "hashing",
            "types",
            "version",
            "wording",
        ):
            (tmp_path / "gpucoll").mkdir(exist_ok=True)
            shutil.copyfile(package / f"{name}.py", tmp_path / "gpucoll" / f"{name}.py")
        for name in {folder.partition("/")[0] for folder in (*COMPILED_FOLDERS, "arrays")}:
            ignored = shutil.ignore_patterns("__pycache__", "nccl", "rccl")
            shutil.copytree(package / name, tmp_path / "gpucoll" / name, ignore=ignored)
        for path in tmp_path.rglob("*.py"):
            os.utime(path, (1, 1))
        return tmp_path

    def test_every_module_with_compiled_functions_counts(self):
        folders = {name.rpartition(".")[0].removeprefix("gpucoll.") for name in precompile.MODULES}
        assert {folder.replace(".", "/") for folder in folders} <= {*COMPILED_FOLDERS}
        assert all((Path(config.__file__).parent / name).is_dir() for name in COMPILED_FOLDERS)

    def test_every_file_with_codes_or_blocks_counts(self):
        counted = {name for name, _ in cache_key._source_files()}
        kept = {name.rpartition(".")[0].partition(".")[2] for name in precompile.MODULES_WHEN_USED}
        for folder in ("src/gpucoll", "kernels", "backends"):
            for path in (ROOT / folder).rglob("*.py"):
                if re.search(r"^class \w+\((Codes|Block)\)", path.read_text("utf-8"), re.M):
                    name = path.relative_to(ROOT).as_posix().removeprefix("src/gpucoll/")
                    of_kept_loops = name.rpartition("/")[0].replace("/", ".") in kept
                    assert name in counted or of_kept_loops, name

    def test_environments_share_what_is_the_same(self, copy):
        assert self.name(copy) == cache_key.key()

    @pytest.mark.parametrize(
        "file", ["types.py", "collectives.py", "blocks.py", "kernels/cpu/jit.py"]
    )
    def test_sources_count(self, copy, file):
        with open(copy / "gpucoll" / file, "a") as source:
            source.write("\n")
        assert self.name(copy) != cache_key.key()

    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("variable", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT"])
    def test_settings_that_make_other_code(self, copy, variable):
        assert self.name(copy, **{variable: "1"}) != self.name(copy)
        assert self.name(copy, NUMBA_CACHE_DIR="/elsewhere") == self.name(copy)

    def test_the_processor_counts(self, monkeypatch):
        usual = cache_key.key.__wrapped__()
        assert usual == cache_key.key()
        monkeypatch.setattr(cache_key, "processor", lambda: "another one")
        assert cache_key.key.__wrapped__() != usual

    @pytest.mark.soak(quick=2)
    @pytest.mark.parametrize(
        ("name", "file"), [("numba", "_version"), ("llvmlite", "_version"), ("numpy", "version")]
    )
    def test_versions_count(self, copy, name, file):
        usual = self.name(copy)
        (copy / name).mkdir()
        (copy / name / "__init__.py").write_text("raise ImportError('not to be imported')")
        (copy / name / f"{file}.py").write_text("version = '0.1'")
        other = self.name(copy)
        (copy / name / f"{file}.py").write_text("version = '0.2'")
        assert len({usual, other, self.name(copy)}) == 3

    def test_versions_without_their_file(self, copy):
        """The metadata of the distribution say it."""
        (copy / "numba").mkdir()
        (copy / "numba" / "__init__.py").write_text("")
        first = self.name(copy)
        for version in ("0.1", "0.2"):
            (copy / f"numba-{version}.dist-info").mkdir()
            (copy / f"numba-{version}.dist-info" / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: numba\nVersion: {version}\n"
            )
            assert self.name(copy) != first
            first = self.name(copy)
            shutil.rmtree(copy / f"numba-{version}.dist-info")

    def test_the_interpreters_binary_interface_counts(self, monkeypatch):
        usual = cache_key.key.__wrapped__()
        monkeypatch.setattr(cache_key, "EXTENSION_SUFFIXES", [".cpython-399t-x86_64-linux-gnu.so"])
        assert cache_key.key.__wrapped__() != usual


class TestProcessor:
    def text(self, tmp_path, **values):
        path = tmp_path / "cpuinfo"
        path.write_text(CPUINFO.format(**{"mhz": 2000, "core": 0, "flag": "avx2", **values}))
        return cache_key.processor(path)

    def test_its_features_count(self, tmp_path):
        assert self.text(tmp_path) != self.text(tmp_path, flag="avx512f")
        assert "avx2" in self.text(tmp_path)

    def test_nothing_that_changes_by_the_hour_does(self, tmp_path):
        assert self.text(tmp_path) == self.text(tmp_path, mhz=3123.4, core=7)

    def test_of_an_arm(self, tmp_path):
        path = tmp_path / "cpuinfo"
        path.write_text("processor\t: 0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40\n\n")
        assert "sve" in cache_key.processor(path)
        assert "0xd40" in cache_key.processor(path)

    def test_without_proc(self, tmp_path):
        assert os.uname().machine in cache_key.processor(tmp_path / "none")


# A module whose "compiled loops" are one file each.
LOOPS = """\
import os, sys, time
from gpucoll.kernels.cpu import cache
folder = cache.building()
if os.environ.get("KILLED_IN") == __name__:
    os.kill(os.getpid(), 9)
if folder is not None:
    (folder / f"{__name__}.nbi").write_bytes(b"machine code" * 100)
    print("compiled", flush=True)
elif cache.folder_to_load_from() is not None:
    print("loaded", flush=True)
else:
    print("for itself", flush=True)
"""
LOAD = """\
import importlib, os, subprocess, sys, threading
from gpucoll import progress
from gpucoll.kernels.cpu import cache, jit
progress.QUIET_S = progress.EVERY_S = 0 if "SHOWN" in os.environ else 60
asked = threading.Event()
class Compiler:
    def compile(self, name):
        importlib.import_module(name)
        jit.compile_module(name)
        if cache.building() and name == "loops_d" and "SHOWN" in os.environ:
            asked.wait(10)  # for the thread that shows it
    def extent(self, folder):
        asked.set()
        return "some of 4 functions"
    def compile_elsewhere(self, folder):
        return subprocess.Popen(["true"])
    def link(self, library):
        pass
names = ["loops_a", "loops_b", "loops_c", "loops_d"]
cache.prepare(names, Compiler())
print(cache.cache_folder())
"""


class Machine:
    """Processes with a home, or none, and modules with loops."""

    def __init__(self, path):
        self.home, self.temporary = path / "home", path / "temporary"
        for folder in (self.home, self.temporary, path / "modules"):
            folder.mkdir(mode=0o700)
        for name in "abcd":
            (path / "modules" / f"loops_{name}.py").write_text(LOOPS)
        hidden = (config.CACHE_DIR, config.LAUNCHER_CACHE, "XDG_CACHE_HOME")
        self.environment = {
            **{name: text for name, text in os.environ.items() if name not in hidden},
            "PYTHONPATH": os.pathsep.join([str(path / "modules"), *filter(None, sys.path)]),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(path / "none"),
            config.COMPILE: "1",  # whatever the package has
        }

    def start(self, code=LOAD, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code=LOAD, **environment):
        """Return what was done with the four modules, the folder, and what was said."""
        with self.start(code, **environment) as process:
            out, err = process.communicate(timeout=60)
        lines = out.splitlines()
        assert process.returncode == 0, err
        return lines[:-1], Path(lines[-1]), err.splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


class TestPlace:
    def test_home(self, machine):
        done, folder, said = machine.run()
        assert done == ["compiled"] * 4
        assert folder.parent == machine.home / ".cache" / "gpucoll"
        assert [folder.stat().st_mode & 0o777 for folder in (folder, folder.parent)] == [0o700] * 2
        assert said == []  # it takes no second
        assert machine.run() == (["loaded"] * 4, folder, [])

    def test_xdg(self, machine, tmp_path):
        _, folder, _ = machine.run(XDG_CACHE_HOME=str(tmp_path / "xdg"))
        assert folder.parent == tmp_path / "xdg" / "gpucoll"
        _, folder, _ = machine.run(XDG_CACHE_HOME="relative")
        assert folder.parent == machine.home / ".cache" / "gpucoll"

    def test_of_a_user_who_is_logged_in_without_a_home(self, machine, tmp_path):
        (tmp_path / "run").mkdir(mode=0o700)
        _, folder, _ = machine.run(HOME="/none", XDG_RUNTIME_DIR=str(tmp_path / "run"))
        assert folder.parent == tmp_path / "run" / "gpucoll"

    def test_without_a_home(self, machine):
        done, folder, said = machine.run(HOME="/none")
        assert done == ["compiled"] * 4
        assert folder.parent.parent == machine.temporary
        assert "for this run alone" in said[0]
        assert not list(machine.temporary.iterdir())
        assert not Path("/none").exists()

    @pytest.mark.parametrize("shared", [".cache", ".cache/gpucoll"])
    def test_a_home_that_others_can_write_to(self, machine, shared):
        """What lies there is neither loaded nor touched."""
        _, folder, _ = machine.run()
        (machine.home / shared).chmod(0o777)
        done, other, said = machine.run()
        assert done == ["compiled"] * 4
        assert other.parent.parent == machine.temporary
        assert f"{machine.home / shared} (owner " in said[0]
        assert "mode 0777) can be written to by other users" in said[0]
        assert folder.exists()

    def test_a_folder_of_loops_that_others_can_write_to_is_replaced(self, machine):
        _, folder, _ = machine.run()
        folder.chmod(0o777)
        done, same, said = machine.run()
        assert (done, same) == (["compiled"] * 4, folder)
        assert "mode 0777) can be written to by other users" in said[0]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert machine.run()[0] == ["loaded"] * 4

    def test_an_older_place_that_anybody_could_take_is_not_looked_at(self, machine):
        taken = machine.temporary / f"gpucoll-{os.geteuid()}"
        taken.mkdir(mode=0o777)
        _, folder, _ = machine.run(HOME="/none")
        assert folder.parent != taken
        assert not list(taken.iterdir())

    def refused(self, machine, named):
        with machine.start(LOAD, GPUCOLL_CACHE_DIR=str(named)) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        message = err.splitlines()[-1]
        assert message.startswith(f"gpucoll.errors.ArgumentError: {config.CACHE_DIR}={named}")
        return message

    def test_named(self, machine, tmp_path):
        _, folder, _ = machine.run(GPUCOLL_CACHE_DIR=str(tmp_path / "named" / "below"))
        assert folder.parent == tmp_path / "named" / "below"

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
    def test_named_but_open_to_others(self, machine, tmp_path, mode):
        (tmp_path / "named").mkdir()
        (tmp_path / "named").chmod(mode)
        message = self.refused(machine, tmp_path / "named")
        assert "named (owner " in message
        assert f"mode {mode:04o}) can be written to by other users" in message
        assert "chmod go-w, name another folder, or unset" in message

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_named_but_another_users(self, machine, tmp_path):
        (tmp_path / "named").mkdir()
        os.chown(tmp_path / "named", 65534, -1)
        message = self.refused(machine, tmp_path / "named")
        assert "65534" in message
        assert "does not belong to user" in message

    def test_named_but_impossible(self, machine):
        message = self.refused(machine, Path("/proc/none"))
        assert "/proc/none: No such file or directory" in message

    def test_a_launcher_hands_its_own_on(self, machine):
        code = (
            "import subprocess, sys\n"
            "from gpucoll.kernels.cpu import cache\n"
            "from gpucoll.launcher.job import rank_environments\n"
            f"code = {LOAD!r}\n"
            "cache.cache_folder()\n"
            "for environment in rank_environments(2, 'none'):\n"
            "    subprocess.run([sys.executable, '-c', code], env=environment, check=True)\n"
            "print(cache.cache_folder())\n"
        )
        lines, folder, said = machine.run(code, HOME="/none")
        first, second = lines[:5], lines[5:]
        assert first == ["compiled"] * 4 + [str(folder)]
        assert second == ["loaded"] * 4 + [str(folder)]
        assert len(said) == 1
        assert not list(machine.temporary.iterdir())


class TestCompiling:
    def test_many_at_once(self, machine):
        processes = [machine.start(SHOWN="1") for _ in range(6)]
        answers = [process.communicate(timeout=60) for process in processes]
        done = sorted(out.splitlines()[0] for out, _ in answers)
        assert done == ["compiled"] + ["loaded"] * 5
        assert len([err for _, err in answers if err]) == 1  # from the one that compiles

    def test_shows_how_far_it_is(self, machine):
        done, folder, said = machine.run(SHOWN="1")
        assert done == ["compiled"] * 4
        *lines, end = (re.sub(r"\d+ s", "N s", line) for line in said)
        assert {*lines} - {"gpucoll: compiling for this machine, once, N s"} == {
            "gpucoll: compiling for this machine, once: some of 4 functions, N s"
        }
        assert end == f"gpucoll: compiled the CPU kernels in N s, into {folder}"
        assert machine.run(SHOWN="1")[2] == []

    @pytest.mark.soak
    def test_shows_it_in_one_line_of_a_terminal(self, machine):
        master, slave = os.openpty()
        environment = {**machine.environment, "SHOWN": "1", "TERM": "xterm", "COLUMNS": "60"}
        command = [sys.executable, "-c", LOAD]
        with open(master, "rb", buffering=0) as screen:
            with open(slave, "w") as stderr:
                subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, stderr=stderr, timeout=60
                )
            shown = b""
            with contextlib.suppress(OSError):  # a terminal's end
                while data := screen.read(4096):
                    shown += data
        *drawn, end = shown.decode().removesuffix("\r\n").split(ERASE_LINE)
        assert not any("\n" in text or len(text) > 59 for text in drawn)
        assert "gpucoll: compiling for this machine, once: some of 4 functi" in drawn
        assert end.startswith("gpucoll: compiled the CPU kernels in ")

    def test_is_told_to_show_nothing(self, machine):
        code = "import threading; threading.Event.wait = lambda *_: True\n" + LOAD
        assert machine.run(code, SHOWN="1", GPUCOLL_PROGRESS="0")[2] == []

    @pytest.mark.parametrize("is_alone", [False, True])
    def test_one_that_waits_alone_shows_it(self, monkeypatch, tmp_path, is_alone):
        shown: list[str] = []
        before = progress.show_by(lambda text, stays: shown.append(text))
        monkeypatch.setattr(progress, "QUIET_S", 0.0)

        class Lock(FolderLock):
            def take(self, *, alone, limit_s=None):
                if limit_s is None and is_alone:
                    assert progress._turn.locked()
                return limit_s is None

        cache._take(Lock(tmp_path), is_alone, alone=True)
        progress.show_by(before)
        assert bool(shown) is is_alone
        assert set(shown) <= {f"{progress.WAITING}, 0 s", ""}

    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("size", [0, 7])
    def test_many_at_once_find_it_damaged(self, machine, size):
        _, folder, _ = machine.run()
        for path in folder.glob("*.nbi"):
            os.truncate(path, size)
        processes = [machine.start() for _ in range(4)]
        answers = [process.communicate(timeout=60) for process in processes]
        done = sorted(out.splitlines()[0] for out, _ in answers)
        assert done == ["compiled"] + ["loaded"] * 3
        said = [line for _, err in answers for line in err.splitlines()]
        assert len(said) == 1
        assert said[0].startswith("gpucoll: compiling the CPU kernels again")
        assert str(folder) in said[0]
        assert "loops_a.nbi is " + ("damaged" if size else "empty") in said[0]

    def test_two_at_once_without_locks(self, machine):
        code = (
            "import fcntl\n"
            "def flock(*_): raise OSError(38, 'Function not implemented')\n"
            "fcntl.flock = flock\n" + LOAD
        )
        processes = [machine.start(code) for _ in range(4)]
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert (process.returncode, len(out.splitlines())) == (0, 5)
        done, folder, said = machine.run()
        assert (done, said) == (["loaded"] * 4, [])
        assert sorted(path.name for path in folder.parent.iterdir()) == [
            folder.name,
            f"{folder.name}.lock",
        ]

    def test_a_module_that_fails(self, machine):
        """Nothing is left that looks complete, and nothing else either."""
        code = "import sys, types\nsys.modules['loops_d'] = None\n" + LOAD
        with machine.start(code) as process:
            _, err = process.communicate(timeout=60)
        assert "ModuleNotFoundError" in err
        done, folder, _ = machine.run()
        assert done == ["compiled"] * 4
        names = {path.name for path in folder.parent.iterdir()}
        assert names == {folder.name, f"{folder.name}.lock"}

    def test_a_process_that_is_killed(self, machine):
        """Another one takes over at once; what the first had begun is never looked at."""
        with machine.start(KILLED_IN="loops_c") as killed:
            waiting = [machine.start() for _ in range(2)]
            killed.communicate(timeout=60)
        answers = [process.communicate(timeout=60) for process in waiting]
        assert [process.returncode for process in (killed, *waiting)] == [-9, 0, 0]
        done = sorted(out.splitlines()[0] for out, _ in answers)
        assert done[-1] == "loaded"
        assert machine.run()[0] == ["loaded"] * 4

    def test_no_room_to_write(self, machine):
        code = (
            "from gpucoll.kernels.cpu import loop_files\n"
            "def begin(folder): raise OSError(28, 'No space left on device', str(folder))\n"
            "loop_files.begin = begin\n" + LOAD
        )
        done, _, said = machine.run(code)
        assert done == ["for itself"] * 4
        assert said[0].endswith("No space left on device")
        assert "but cannot keep them" in said[0]

    def test_a_failed_write_that_names_no_file(self, machine):
        code = (
            "from gpucoll.kernels.cpu import loop_files\n"
            "def publish(made, folder): raise OSError(28, 'No space left on device')\n"
            "loop_files.publish = publish\n" + LOAD
        )
        _, _, said = machine.run(code)
        assert said[0].endswith("but cannot keep them: No space left on device")

    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("is_named", [False, True])
    def test_a_launcher_without_room_compiles_once(self, machine, tmp_path, is_named):
        """Ranks then load what it has compiled, which lies elsewhere for as long."""
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        code = (
            f"import resource, subprocess, sys\n{limit}"
            "from gpucoll.kernels.cpu import cache\n"
            "from gpucoll.launcher.job import rank_environments\n"
            "cache.cache_folder()\n"
            "for environment in rank_environments(2, 'none'):\n"
            f"    command = [sys.executable, '-c', {LOAD!r}]\n"
            "    subprocess.run(command, env=environment, check=True)\n"
            "print(cache.cache_folder())\n"
        )
        named = {config.CACHE_DIR: str(tmp_path / "named")} if is_named else {}
        lines, folder, said = machine.run(code, **named)
        assert lines == ["compiled"] * 4 + [str(folder)] + ["loaded"] * 4 + [str(folder)]
        assert folder.parent.parent == machine.temporary
        usual = tmp_path / "named" if is_named else machine.home / ".cache" / "gpucoll"
        assert "for this run alone (10 s to a minute), since there is no folder" in said[0]
        assert f"{usual}: File too large" in said[0]
        assert len(said) == 1

    @pytest.mark.soak
    def test_without_standard_error(self, machine):
        """What is opened then has its number, and gets nothing of the progress."""
        done, folder, said = machine.run("import os\nos.close(2)\n" + LOAD, SHOWN="1")
        assert (done, said) == (["compiled"] * 4, [])
        assert folder.with_name(f"{folder.name}.lock").read_bytes() == b""

    def test_a_second_init_looks_at_nothing(self, machine):
        code = LOAD + (
            "import shutil; shutil.rmtree(cache.cache_folder().parent)\n"
            "cache.prepare(names, None)\n"
            "print('again'); print(cache.cache_folder())\n"
        )
        assert machine.run(code)[0][-1] == "again"


class TestLibrary:
    """What is linked of all loops lies among their files."""

    LINK = LOAD.replace("        pass\n", "        library.write_bytes(b'no library' * 100)\n")

    def test_is_looked_at_like_every_file(self, machine):
        """One that cannot be loaded is no reason to compile again; one that was changed is."""
        _, folder, _ = machine.run(self.LINK)
        assert machine.run(self.LINK) == (["loaded"] * 4, folder, [])
        with open(folder / "kernels.so", "r+b") as file:
            file.write(b"No")
        done, same, said = machine.run(self.LINK)
        assert (done, same) == (["compiled"] * 4, folder)
        assert "kernels.so is damaged" in said[0]
        (folder / "kernels.so").unlink()
        assert "kernels.so is missing" in machine.run(self.LINK)[2][0]

    def test_that_others_can_write_to(self, machine):
        _, folder, _ = machine.run(self.LINK)
        (folder / "kernels.so").chmod(0o666)
        done, _, said = machine.run(self.LINK)
        assert done == ["compiled"] * 4
        assert "kernels.so is no file that this user alone can write to" in said[0]

    def test_what_stands_against_it_is_said(self, machine):
        failing = LOAD.replace("        pass\n", "        raise ValueError('no linker for this')\n")
        done, folder, said = machine.run(failing)
        assert done == ["compiled"] * 4
        assert said[0].endswith(f"into {folder}, but ranks will start slowly: no linker for this")
        assert machine.run(failing) == (["loaded"] * 4, folder, [])


# One real loop, compiled by Numba.
LOOP = """\
from gpucoll.kernels.cpu.jit import compiled, types
@compiled
def add_one(x):
    return x + 1
print(add_one.ctypes(41), add_one.numba.cache_hits, flush=True)
"""


class TestNumba:
    @pytest.fixture
    def machine(self, tmp_path):
        machine = Machine(tmp_path)
        for name in "bcd":
            (tmp_path / "modules" / f"loops_{name}.py").write_text("")
        (tmp_path / "modules" / "loops_a.py").write_text(LOOP)
        return machine

    @pytest.mark.soak
    def test_is_loaded_from_there_and_nowhere_else(self, machine, tmp_path):
        numba_dir = tmp_path / "numba"
        done, folder, _ = machine.run(NUMBA_CACHE_DIR=str(numba_dir))
        assert done == ["42 0"]
        assert not numba_dir.exists()
        names = sorted(path.name.partition("-")[0] for path in folder.glob("*.nb?"))
        assert names == ["add_one", "add_one"]
        modules = tmp_path / "modules"
        os.rename(modules, tmp_path / "moved")  # another place, and another age
        os.utime(tmp_path / "moved" / "loops_a.py", (1, 1))
        path = machine.environment["PYTHONPATH"].replace(str(modules), str(tmp_path / "moved"))
        assert machine.run(PYTHONPATH=path) == (["42 1"], folder, [])

    @pytest.mark.soak
    @pytest.mark.parametrize("suffix", ["nbi", "nbc"])
    def test_is_compiled_where_a_file_is_damaged_while_it_is_loaded(self, machine, suffix):
        machine.run()
        code = (
            "import os\nfrom gpucoll.kernels.cpu import loop_files\n"
            "look = loop_files.look\n"
            "def damage(folder):\n"
            "    found = look(folder)\n"
            f"    for path in folder.glob('*.{suffix}'): os.truncate(path, 3)\n"
            "    return found\n"
            "loop_files.look = damage\n" + LOAD
        )
        done, _, said = machine.run(code)
        assert done == ["42 0"]
        assert len(said) == 1
        assert "was changed just now" in said[0]

    @pytest.mark.soak
    def test_a_module_that_is_imported_by_itself_serves(self, machine):
        """It neither writes what nobody would look for, nor loads what was not looked at."""
        code = "import loops_a\nfrom gpucoll.kernels.cpu import cache\nprint(cache.cache_folder())"
        done, folder, _ = machine.run(code)
        assert (done, list(folder.iterdir())) == (["42 0"], [])
        _, folder, _ = machine.run()
        assert machine.run(code) == (["42 1"], folder, [])
