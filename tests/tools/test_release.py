"""A release: what it refuses, and what it leaves in a checkout; its packages are those of CI."""

from __future__ import annotations

import datetime
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pythons  # noqa: E402
import release  # noqa: E402
import wheels  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

CHANGELOG = """# Changelog

## 0.1.0 (not released)

### Added

- Something.
"""
TODAY = datetime.date.today().isoformat()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout with the files that contain the version, and a build that takes no time."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    for name, line in release.PLACES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"before\n{line.format('0.1.0.dev0')}\nafter\n")
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    (root / ".gitignore").write_text("dist/\n")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "tests")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tests@localhost")
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "First")):
        release.git(*command, at=root)

    def build(tree: Path, dist: Path, interpreters: dict[str, Path]) -> list[Path]:
        dist.mkdir()
        package = dist / f"gpucoll-{release.version_of(tree)}.tar.gz"
        package.touch()
        return [package]

    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr(release.git, "__kwdefaults__", {"at": root})
    monkeypatch.setattr(wheels, "build", build)
    monkeypatch.setattr(pythons, "promised", lambda: ["3.10"])
    monkeypatch.setattr(pythons, "find", lambda version: Path(sys.executable))
    return root


def test_one_command_releases(checkout, capsys):
    assert release.main(["0.1.0"]) == 0

    assert release.git("log", "--format=%s").splitlines() == [
        "Begin 0.2.0", "Release 0.1.0", "First",
    ]  # fmt: skip
    assert release.git("rev-parse", "v0.1.0^{commit}") == release.git("rev-parse", "HEAD~1")
    for name, line in release.PLACES:
        assert line.format("0.1.0") in release.git("show", f"v0.1.0:{name}").splitlines()
        assert line.format("0.2.0.dev0") in (checkout / name).read_text().splitlines()
    assert f"## 0.1.0 ({TODAY})\n" in release.git("show", "v0.1.0:CHANGELOG.md")
    newest, released = release.HEADING.findall((checkout / "CHANGELOG.md").read_text())
    assert (newest, released) == (("0.2.0", "not released"), ("0.1.0", TODAY))
    assert [path.name for path in (checkout / "dist/0.1.0").iterdir()] == ["gpucoll-0.1.0.tar.gz"]
    assert release.git("status", "--porcelain") == ""
    assert len(release.git("worktree", "list").splitlines()) == 1
    said = capsys.readouterr().out
    assert "git push origin HEAD v0.1.0\n" in said
    assert "twine upload dist/0.1.0/gpucoll-0.1.0.tar.gz\n" in said


def test_a_dry_run_changes_nothing(checkout, capsys):
    before = release.git("rev-parse", "HEAD")
    assert release.main(["0.1.0", "--dry-run"]) == 0

    assert release.git("rev-parse", "HEAD") == before
    assert release.git("tag") == release.git("status", "--porcelain") == ""
    assert not (checkout / "dist").exists()
    assert "0.1.0 can be released; nothing was changed" in capsys.readouterr().out


def test_nor_does_a_build_that_fails(checkout, monkeypatch):
    def fail(*_: object) -> None:
        raise SystemExit("no wheel")

    monkeypatch.setattr(wheels, "build", fail)
    with pytest.raises(SystemExit, match="no wheel"):
        release.main(["0.1.0"])
    assert release.git("log", "--format=%s") == "First"
    assert release.git("tag") == release.git("status", "--porcelain") == ""
    assert len(release.git("worktree", "list").splitlines()) == 1


def test_nor_does_a_release_beside_another_commit(checkout, monkeypatch):
    build = wheels.build

    def commit_meanwhile(*arguments: Any) -> list[Path]:
        release.git("commit", "-q", "--allow-empty", "-m", "Second")
        return build(*arguments)

    monkeypatch.setattr(wheels, "build", commit_meanwhile)
    with pytest.raises(SystemExit, match="merge"):
        release.main(["0.1.0"])
    assert release.git("log", "--format=%s").splitlines() == ["Second", "First"]
    assert release.git("tag") == ""
    assert not (checkout / "dist").exists()


def test_the_version_of_a_format_stays(tmp_path):
    for name, line in release.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"cff-version: 1.2.0\n  {line.format('1.2.0')}\n")
    (tmp_path / release.PLACES[0][0]).write_text(release.PLACES[0][1].format("1.2.0"))
    release.set_version(tmp_path, "1.3.0.dev0")
    assert (tmp_path / "CITATION.cff").read_text() == "cff-version: 1.2.0\n  version: 1.3.0.dev0\n"


def test_what_is_refused(checkout, monkeypatch):
    for version, why in (
        ("0.1", "no version of three numbers"),
        ("0.2.0", r"must be '## 0.2.0 \(not released\)'; it is '## 0.1.0 \(not released\)'"),
    ):
        with pytest.raises(SystemExit, match=why):
            release.main([version])
    (checkout / "new.py").touch()
    with pytest.raises(SystemExit, match=r"not committed:\n\?\? new.py"):
        release.main(["0.1.0"])
    (checkout / "new.py").unlink()
    monkeypatch.setattr(pythons, "find", lambda version: None)
    with pytest.raises(SystemExit, match=r"no Python 3.10: install it, .*--without 3.10"):
        release.main(["0.1.0"])
    release.git("tag", "v0.1.0")
    with pytest.raises(SystemExit, match=r"the tag v0.1.0 exists"):
        release.main(["0.1.0"])


def test_a_changelog_without_changes():
    empty = CHANGELOG.replace("- Something.\n", "## 0.0.1 (2026-01-01)\n\n- Older.\n")
    with pytest.raises(SystemExit, match=r"the section of 0.1.0 names no change"):
        release.with_date(empty, "0.1.0", datetime.date(2026, 1, 2))


def test_each_file_of_this_checkout_contains_the_version_once():
    version = release.version_of(ROOT)
    for name, line in release.PLACES:
        assert (ROOT / name).read_text("utf-8").count(line.format(version)) == 1, name


def test_this_changelog_can_be_released():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    version = release.version_of(ROOT).partition(".dev")[0]
    released = release.with_date(text, version, datetime.date(2026, 1, 2))
    assert f"## {version} (2026-01-02)\n" in released
    assert released.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"a", "b", "x"}, r"has \['x'\] too many and lacks \[\]"),
        ({"a"}, r"has \[\] too many and lacks \['b'\]"),
    ],
)
def test_a_package_with_other_files(names, text):
    with pytest.raises(SystemExit, match=text):
        wheels.check(Path("gpucoll.whl"), names, {"a", "b"})
