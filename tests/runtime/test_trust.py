"""Which folders and files can be changed by this user and root alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.permissions import NOBODY, give_away

from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.folders import UntrustedError, read_trusted, require_trusted_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX")


# --- Folders


def test_a_folder_of_this_user_is_trusted(tmp_path):
    for mode in (0o700, 0o755, 0o555):
        tmp_path.chmod(mode)
        require_trusted_folder(tmp_path)
    tmp_path.chmod(0o755)
    require_trusted_folder(Path("/"))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722, 0o1777])
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, mode):
    tmp_path.chmod(mode)
    fix = f"name a folder within {tmp_path}" if mode & 0o1000 else f"run 'chmod go-w {tmp_path}'"
    with pytest.raises(UntrustedError, match=rf"can write {tmp_path} \(mode {mode:o}\)") as found:
        require_trusted_folder(tmp_path)
    assert found.value.fix == fix


def test_file_in_the_path_is_no_permission_error():
    """The error must not advise to change the mode of /dev/null."""
    with pytest.raises(NotADirectoryError):
        require_trusted_folder(Path("/dev/null"))


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_below_one_that_others_can_write_is_not_trusted(tmp_path, mode):
    below = tmp_path / "open" / "a" / "b"
    below.mkdir(parents=True)
    require_trusted_folder(below)
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UntrustedError, match=rf"can write {tmp_path}/open "):
        require_trusted_folder(below)


def test_a_folder_below_a_sticky_one_is_trusted(tmp_path):
    """For example /tmp, where nobody can rename another user's files."""
    below = tmp_path / "sticky" / "mine"
    below.mkdir(parents=True)
    (tmp_path / "sticky").chmod(0o1777)
    require_trusted_folder(below)
    with pytest.raises(UntrustedError):
        require_trusted_folder(below / "..")


@pytest.mark.parametrize("whose", ["", "parent", "parent/folder"])
def test_a_folder_of_another_user_is_not_trusted(tmp_path, whose):
    folder = tmp_path / "parent" / "folder"
    folder.mkdir(parents=True)
    require_trusted_folder(folder)
    give_away(tmp_path / whose)
    with pytest.raises(UntrustedError, match=f"belongs to user {NOBODY}, this process runs as"):
        require_trusted_folder(folder)


def test_the_folder_that_a_link_leads_to_counts(tmp_path):
    (tmp_path / "open" / "folder").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    for target in ("open/folder", str(tmp_path / "open" / "folder"), "own/../open/folder"):
        link = tmp_path / "own" / str(len(target))
        link.symlink_to(target if target.startswith("/") else f"../{target}")
        (tmp_path / "open").chmod(0o755)
        require_trusted_folder(link)
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(UntrustedError, match=f"{tmp_path}/open "):
            require_trusted_folder(link)


def test_the_folder_that_holds_a_link_counts(tmp_path):
    """A user who can write to the folder can replace the link."""
    (tmp_path / "own").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "own")
    require_trusted_folder(tmp_path / "open" / "link")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedError, match=f"{tmp_path}/open "):
        require_trusted_folder(tmp_path / "open" / "link")
    (tmp_path / "open").chmod(0o1777)  # where only its owner can replace the link
    require_trusted_folder(tmp_path / "open" / "link")
    give_away(tmp_path / "open" / "link")
    with pytest.raises(UntrustedError, match="open/link belongs to"):
        require_trusted_folder(tmp_path / "open" / "link")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        require_trusted_folder(tmp_path / "a" / "c")


# --- Files


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_can_write_is_not_read(tmp_path, mode):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    file.chmod(0o644)
    assert read_trusted(file) == b"content"
    file.chmod(mode)
    with pytest.raises(UntrustedError, match=rf"can write {file} \(mode {mode:o}\)"):
        read_trusted(file)


def test_a_file_of_another_user_is_not_read(tmp_path):
    file = tmp_path / "file"
    file.touch(0o644)
    give_away(file)
    with pytest.raises(UntrustedError, match=f"belongs to user {NOBODY}"):
        read_trusted(file)


@pytest.mark.parametrize("kind", ["symbolic link", "FIFO", "folder", "device"])
def test_other_than_regular_files_are_not_read(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "symbolic link":
        (tmp_path / "other").write_bytes(b"content")
        path.symlink_to("other")
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(UntrustedError, match="symbolic link" if "link" in kind else "no regular"):
        read_trusted(path)


def test_files_and_folders_are_closed_to_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cache.write_atomically(tmp_path / "a" / "b" / "file", b"content")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/file")]
    assert modes == [0o755, 0o755, 0o644]
