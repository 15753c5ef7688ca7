"""From which folders code is loaded: those that nobody else can put anything into."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpucoll.kernels.cpu import own_folders
from gpucoll.kernels.cpu.own_folders import UnsafeFolderError, is_own_file, own_folder
from gpucoll.kernels.cpu.private_folder import PrivateFolder

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


def made(path: Path, mode: int = 0o700, owner: int = -1) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, -1)
    return path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_this_users_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = own_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder == tmp_path / "a" / "b"
    assert mode_of(folder) == mode_of(tmp_path / "a") == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o500])
def test_a_folder_that_others_may_read(tmp_path, mode):
    assert own_folder(made(tmp_path / "x", mode)).exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o702])
def test_a_folder_that_others_can_write_to(tmp_path, mode):
    folder = made(tmp_path / "x", mode)
    with pytest.raises(UnsafeFolderError) as raised:
        own_folder(folder)
    for text in (str(folder), f"mode {mode:04o}", pwd.getpwuid(os.geteuid()).pw_name):
        assert text in str(raised.value)


def test_a_folder_on_the_way_that_others_can_write_to(tmp_path):
    open_folder = made(tmp_path / "open", 0o777)
    made(open_folder / "mine")
    with pytest.raises(UnsafeFolderError, match=r"open \(owner .*written to by other"):
        own_folder(open_folder / "mine")
    open_folder.chmod(0o1777)  # as /tmp is
    assert own_folder(open_folder / "mine").exists()
    assert mode_of(own_folder(open_folder / "new")) == 0o700


class TestGroups:
    @pytest.fixture
    def user(self, monkeypatch):
        """A user whose group has the same name and no other members."""
        me = pwd.getpwuid(os.geteuid())
        members: list[str] = []

        def group_of(number):
            return type("Group", (), {"gr_name": me.pw_name, "gr_mem": members})

        monkeypatch.setattr("grp.getgrgid", group_of)
        return members

    def folder(self, tmp_path):
        folder = made(tmp_path / "x", 0o775)
        os.chown(folder, -1, pwd.getpwuid(os.geteuid()).pw_gid)
        return folder

    def test_of_one_user_alone(self, tmp_path, user):
        assert own_folder(self.folder(tmp_path)).exists()

    def test_with_another_member(self, tmp_path, user):
        user.append("eve")
        with pytest.raises(UnsafeFolderError, match="written to by other users"):
            own_folder(self.folder(tmp_path))

    def test_of_another_name(self, tmp_path, monkeypatch):
        group = type("Group", (), {"gr_name": "staff-of-all", "gr_mem": []})
        monkeypatch.setattr("grp.getgrgid", lambda number: group)
        with pytest.raises(UnsafeFolderError, match="written to by other users"):
            own_folder(self.folder(tmp_path))

    def test_with_a_list_of_others(self, tmp_path, user, monkeypatch):
        monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
        with pytest.raises(UnsafeFolderError, match="written to by other users"):
            own_folder(self.folder(tmp_path))


@as_root
class TestOtherUsers:
    def test_folder(self, tmp_path):
        folder = made(tmp_path / "x", 0o755, STRANGER)
        with pytest.raises(UnsafeFolderError, match=rf"x \(owner .*{STRANGER}.*does not belong"):
            own_folder(folder)

    def test_folder_on_the_way(self, tmp_path):
        made(made(tmp_path / "theirs", 0o755, STRANGER) / "mine")
        with pytest.raises(UnsafeFolderError, match=r"theirs .*does not belong to user"):
            own_folder(tmp_path / "theirs" / "mine")
        with pytest.raises(UnsafeFolderError, match=r"theirs .*does not belong to user"):
            own_folder(tmp_path / "theirs" / "new")
        assert not (tmp_path / "theirs" / "new").exists()

    def test_behind_a_link(self, tmp_path):
        folder = made(tmp_path / "theirs", 0o755, STRANGER)
        (tmp_path / "link").symlink_to(folder)
        with pytest.raises(UnsafeFolderError, match=r"theirs .*does not belong to user"):
            own_folder(tmp_path / "link")

    def test_link_to_what_is_mine_leads_there(self, tmp_path):
        """What its owner makes of it later does not count: the real path is used from then on."""
        folder = made(tmp_path / "mine")
        link = tmp_path / "link"
        link.symlink_to(folder)
        os.chown(link, STRANGER, -1, follow_symlinks=False)
        assert own_folder(link) == folder

    @pytest.mark.parametrize("below", ["", "below", "below/new"])
    def test_their_link_in_a_sticky_folder(self, tmp_path, below):
        """Its owner may have it lead elsewhere at any time, to what is mine as well."""
        made(made(tmp_path / "mine") / "below")
        link = made(tmp_path / "open", 0o1777) / "link"
        link.symlink_to(tmp_path / "mine")
        assert own_folder(link / below) == tmp_path / "mine" / below
        os.chown(link, STRANGER, -1, follow_symlinks=False)
        with pytest.raises(UnsafeFolderError, match=rf"link \(owner .*{STRANGER}.*another user's"):
            own_folder(link / below)

    def test_folder_that_a_link_lies_in(self, tmp_path):
        """Its owner may put another link in the place of mine."""
        made(tmp_path / "mine")
        link = made(tmp_path / "theirs", 0o755, STRANGER) / "link"
        link.symlink_to(tmp_path / "mine")
        with pytest.raises(UnsafeFolderError, match=r"theirs .*does not belong to user"):
            own_folder(link)

    def test_files(self, tmp_path):
        file = tmp_path / "file"
        file.write_bytes(b"")
        assert is_own_file(file.stat())
        file.chmod(0o646)
        assert not is_own_file(file.stat())
        file.chmod(0o644)
        os.chown(file, STRANGER, -1)
        assert not is_own_file(file.stat())

    def test_a_user_sees_roots_folder_as_no_ones_in_a_name_space(self, tmp_path, monkeypatch):
        """As in a container without root: "/" and its like belong to somebody outside."""
        home = made(tmp_path / "home", 0o755)
        monkeypatch.setattr(own_folders, "_is_of_no_user_here", lambda uid: uid == STRANGER)
        real = os.lstat

        def lstat(path):
            facts = real(path)
            if Path(path) in home.parents:
                facts = os.stat_result((*facts[:4], STRANGER, *facts[5:10]))
            return facts

        monkeypatch.setattr(os, "lstat", lstat)
        if any(parent.stat().st_mode & 0o022 for parent in home.parents):
            with pytest.raises(UnsafeFolderError):  # below /tmp it may be anybody's
                own_folder(home)
        made(home / ".cache", 0o755)
        os.chown(home / ".cache", STRANGER, -1)
        with pytest.raises(UnsafeFolderError, match="does not belong"):
            own_folder(home / ".cache" / "gpucoll")


def test_links_are_followed_as_the_system_does(tmp_path):
    made(made(tmp_path / "a") / "b")
    (tmp_path / "a" / "up").symlink_to("../c/../a")
    made(tmp_path / "c")
    (tmp_path / "c" / "there").symlink_to(tmp_path / "a" / "up" / "b")
    for way in ("c/there", "c/there/../b", "a/up/b", "c/../a/./b", "c/there/new"):
        assert own_folder(tmp_path / way) == Path(os.path.realpath(tmp_path / way))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path / "c")
        assert own_folder(Path("there")) == tmp_path / "a" / "b"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        own_folder(tmp_path / "round")
    assert own_folder(Path("/").joinpath("..", *tmp_path.parts[1:])) == tmp_path


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafeFolderError, match="is not a folder"):
        own_folder(tmp_path / "file")
    with pytest.raises(UnsafeFolderError, match="is not a folder"):
        own_folder(tmp_path / "file" / "below")


class TestPrivateFolder:
    MAKE = (
        "from gpucoll.kernels.cpu.private_folder import PrivateFolder\n"
        "import os, signal\n"
        "print(PrivateFolder().path, flush=True)\n"
        "os.chdir(os.environ['TMPDIR'])\n"
    )

    def run(self, code, tmp_path):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", self.MAKE + code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return Path(done.stdout.partition("\n")[0]), done

    def test_is_gone_with_its_process(self, tmp_path):
        code = "assert os.stat(os.listdir()[0]).st_mode & 0o777 == 0o700"
        path, done = self.run(code, tmp_path)
        assert (path.parent, done.returncode) == (tmp_path, 0)
        assert not list(tmp_path.iterdir())

    def test_a_forked_child_leaves_it(self, tmp_path):
        code = (
            "if pid := os.fork(): os.waitpid(pid, 0); print(os.listdir('.'))\n"
            "else: raise SystemExit\n"
        )
        _, done = self.run(code, tmp_path)
        assert "gpucoll-" in done.stdout.splitlines()[-1]
        assert not list(tmp_path.iterdir())

    def test_of_a_process_that_was_killed_goes_with_the_next(self, tmp_path):
        path, done = self.run("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
        assert done.returncode == -signal.SIGKILL
        assert path.exists()
        self.run("", tmp_path)
        assert path.exists()  # it may be about to be locked
        long_ago = time.time() - 1000
        os.utime(path, (long_ago, long_ago))
        self.run("", tmp_path)
        assert not path.exists()

    def test_of_a_process_that_runs_stays(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        mine = PrivateFolder()
        try:
            os.utime(mine.path, (0, 0))
            self.run("", tmp_path)
            assert mine.path.exists()
        finally:
            mine.remove()

    def test_is_not_made_where_others_could_replace_it(self, tmp_path):
        path, _ = self.run("", made(tmp_path / "open", 0o777))
        assert path.parent != tmp_path / "open"
