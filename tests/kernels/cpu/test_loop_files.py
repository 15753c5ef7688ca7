"""The files of compiled loops: whole or not used, and old ones removed."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from gpucoll.kernels.cpu import loop_files
from gpucoll.kernels.cpu.loop_files import FolderLock, begin, look, publish, remove_old

NAMES = ("a.nbi", "a.1.nbc")
DAY_S = 86400


def filled(folder):
    made = begin(folder)
    for name in NAMES:
        (made / name).write_bytes(name.encode() * 100)
    (made / "a.nbi.tmp.123").write_bytes(b"left by a process that was killed")
    return made


@pytest.fixture
def folder(tmp_path):
    """A folder of loops that is complete."""
    folder = tmp_path / f"loops-{0:016x}"
    publish(filled(folder), folder)
    assert look(folder).is_complete
    return folder


def be_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


class TestLook:
    def test_nothing_there(self, tmp_path):
        (tmp_path / "empty").mkdir()
        assert look(tmp_path / "empty") == loop_files.Contents(False)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        ("damage", "text"),
        [
            (lambda path: os.truncate(path, 0), "is empty"),
            (lambda path: os.truncate(path, 10), "is damaged"),
            (lambda path: path.write_bytes(os.urandom(600)), "is damaged"),
            (lambda path: path.unlink(), "is missing"),
            (lambda path: path.chmod(0o666), "this user alone"),
            (lambda path: (path.unlink(), path.symlink_to("complete")), "symbolic link"),
            (lambda path: (path.unlink(), path.mkdir()), "irectory"),
            (be_a_pipe, "this user alone"),
        ],
    )
    def test_damage(self, folder, name, damage, text):
        damage(folder / name)
        found = look(folder)
        assert not found.is_complete
        assert name in found.damage
        assert text in found.damage

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a.nbi": 3}', '{"x": ""}', "\0\xff"])
    def test_damaged_list(self, folder, text):
        (folder / "complete").write_text(text)
        found = look(folder)
        assert not found.is_complete
        assert found.damage

    def test_a_folder_that_others_can_write_to(self, folder):
        folder.chmod(0o777)
        assert "can be written to by other users" in look(folder).damage


class TestPublish:
    def test_over_a_damaged_one(self, folder):
        os.truncate(folder / NAMES[0], 0)
        publish(filled(folder), folder)
        assert look(folder).is_complete
        assert sorted(json.loads((folder / "complete").read_text())) == sorted(NAMES)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def test_of_two_at_once_both_succeed(self, folder):
        os.truncate(folder / NAMES[0], 0)
        one, two = filled(folder), filled(folder)
        publish(one, folder)
        inode = folder.stat().st_ino
        publish(two, folder)
        assert folder.stat().st_ino == inode  # who loads from it is left alone
        assert look(folder).is_complete
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def test_over_what_is_no_folder(self, folder):
        os.rename(folder, folder.with_name("elsewhere"))
        folder.write_text("")
        publish(filled(folder), folder)
        assert look(folder).is_complete

    def test_over_a_link(self, folder):
        elsewhere = folder.with_name("elsewhere")
        os.rename(folder, elsewhere)
        os.truncate(elsewhere / NAMES[0], 0)
        folder.symlink_to(elsewhere)
        publish(filled(folder), folder)
        assert look(folder).is_complete
        assert not folder.is_symlink()

    def test_others_cannot_write_to_the_files(self, tmp_path):
        before = os.umask(0)
        try:
            folder = tmp_path / "loops"
            publish(filled(folder), folder)
        finally:
            os.umask(before)
        for path in (folder, *folder.iterdir()):
            assert not path.stat().st_mode & 0o077


class TestSalvage:
    def test_what_is_whole_need_not_be_compiled_again(self, tmp_path):
        folder = tmp_path / "loops-0123456789abcdef"
        made = loop_files.begin(folder)
        for name in ("a.nbi", "b.nbi", "c.nbc", "kernels.so"):
            (made / name).write_bytes(name.encode() * 100)
        loop_files.publish(made, folder)
        (folder / "b.nbi").write_bytes(b"b.nbi")
        (folder / "c.nbc").chmod(0o666)
        (folder / "d.nbi").write_bytes(b"not listed")
        made = loop_files.begin(folder)
        loop_files.salvage(folder, made)
        assert [path.name for path in made.iterdir()] == ["a.nbi"]
        assert (made / "a.nbi").read_bytes() == b"a.nbi" * 100

    def test_nothing_of_a_folder_without_a_list(self, tmp_path):
        folder, made = tmp_path / "loops-0123456789abcdef", tmp_path / "made"
        made.mkdir(mode=0o700)
        loop_files.salvage(folder, made)
        (folder / "complete").write_text("[1]")
        loop_files.salvage(folder, made)
        (folder / "complete").write_text('{"../x": "", "a": 5}')
        loop_files.salvage(folder, made)
        assert not list(made.iterdir())


class TestRemoveOld:
    def other(self, folder, number, age_days):
        path = folder.with_name(f"loops-{number:016x}")
        publish(filled(path), path)
        then = time.time() - age_days * DAY_S
        os.utime(path / "complete", (then, then))
        return path

    def test_unused_for_a_month(self, folder):
        fresh, old = self.other(folder, 1, 29), self.other(folder, 2, 31)
        remove_old(folder)
        assert fresh.exists()
        assert not old.exists()

    def test_all_but_the_last_few(self, folder):
        paths = [self.other(folder, number, number / 10) for number in range(1, 12)]
        remove_old(folder)
        kept = loop_files.KEPT_FOLDERS - 1  # and the one in use
        assert [path.exists() for path in paths] == [True] * kept + [False] * (11 - kept)
        assert folder.exists()

    def test_never_the_one_that_is_used_now(self, folder):
        os.utime(folder / "complete", (0, 0))
        remove_old(folder)
        assert folder.exists()

    def test_not_what_another_process_loads(self, folder):
        old = self.other(folder, 1, 100)
        with FolderLock(old) as lock:
            lock.take(alone=False)
            remove_old(folder)
            assert old.exists()
        remove_old(folder)
        assert not old.exists()
        assert not old.with_name(f"{old.name}.lock").exists()

    def test_what_a_killed_process_had_begun(self, folder):
        begun, just_now = begin(folder), begin(folder)
        os.utime(begun, (0, 0))
        remove_old(folder)
        assert not begun.exists()
        assert just_now.exists()

    def test_nothing_else(self, folder):
        others = [folder.with_name(name) for name in ("notes", "loops-x", ".hidden", ".loops")]
        for path in others:
            path.mkdir()
            os.utime(path, (0, 0))
        link = folder.with_name(f"loops-{3:016x}")
        link.symlink_to(others[0])
        remove_old(folder)
        assert all(path.exists() for path in (*others, link))

    def test_use_counts(self, folder):
        os.utime(folder / "complete", (0, 0))
        loop_files.touch(folder)
        assert time.time() - (folder / "complete").stat().st_mtime < DAY_S


class TestLock:
    def test_one_makes_while_nobody_loads(self, folder):
        with FolderLock(folder) as one, FolderLock(folder) as two:
            one.take(alone=False)
            assert not two.take_at_once()
        with FolderLock(folder) as lock:
            assert lock.take_at_once()

    def test_several_load_at_once(self, folder):
        with FolderLock(folder) as one, FolderLock(folder) as two:
            one.take(alone=False)
            two.take(alone=False)

    def test_waiting_has_an_end(self, folder, monkeypatch):
        monkeypatch.setattr(loop_files, "LOCK_WAIT_S", 0.05)
        with FolderLock(folder) as one, FolderLock(folder) as two:
            one.take(alone=True)
            two.take(alone=True)  # goes on without

    def test_a_lock_that_was_removed_is_none(self, folder):
        path = folder.with_name(f"{folder.name}.lock")
        with FolderLock(folder) as one, FolderLock(folder) as two:
            one.take(alone=True)
            assert not two.take_at_once()
            one.remove()
            one.take(alone=True)  # is of the new file
            assert path.exists()
            assert not two.take_at_once()

    def test_file_systems_without_locks(self, folder, monkeypatch):
        def flock(descriptor, kind):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", flock)
        with FolderLock(folder) as one:
            one.take(alone=True)
            assert not one.take_at_once()  # so nothing is removed
