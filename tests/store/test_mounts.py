"""A store is not written where machines see different states of one file."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from memstore.errors import StoreError
from memstore.store import MemoryStore
from memstore_backends import mounts
from tests.store import making

LINES = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 0:50 / /mnt rw - tmpfs tmpfs rw
41 40 0:51 / /mnt/far\040away rw,relatime shared:9 master:2 - nfs4 server:/a\040b rw,vers=4.2
42 27 0:52 / /twice rw - cifs //server/share rw
43 42 0:53 / /twice rw - xfs /dev/vdb rw
44 27 0:54 / /mnt/far - fuse.sshfs
broken
"""


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(LINES)
    monkeypatch.setattr(mounts, "MOUNTS", file)
    return file


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/library", "ext4"),
        ("/procession", "ext4"),
        ("/mnt/near", "tmpfs"),
        ("/mnt/far away", "nfs4"),
        ("/mnt/far away/library", "nfs4"),
        ("/mnt/far awayness", "tmpfs"),
        ("/mnt/far/library", "fuse.sshfs"),
        ("/twice/library", "xfs"),
    ],
)
def test_the_innermost_mount_tells_the_file_system(mounted: Path, path: str, kind: str) -> None:
    assert mounts.file_system(Path(path)) == kind


def test_a_system_that_does_not_tell_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "missing")
    assert mounts.file_system(tmp_path) is None
    memstore.open(tmp_path / "library").close()


def test_the_real_table_knows_this_folder(tmp_path: Path) -> None:
    assert mounts.file_system(tmp_path) not in (None, "proc")


def test_a_store_on_a_network_file_system_is_read_and_not_written(library: MemoryStore, mounted: Path) -> None:
    making.write(library)
    library.close()
    mounted.write_text(f"27 1 254:0 / {library.path.parent} rw,relatime - nfs4 server:/a rw\n")
    for path in (library.path, library.path.parent / "new"):
        with pytest.raises(StoreError, match=r"network file system \(nfs4\).* disk of this machine"):
            memstore.open(path)
    assert not (library.path.parent / "new").exists()
    with memstore.open(library.path, "r") as reading:
        making.check(reading["esther"])
