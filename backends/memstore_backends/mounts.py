"""Which file system a path lies on: LMDB needs one whose memory maps and locks all of its users see alike."""

from __future__ import annotations

import re
from pathlib import Path

from memstore.errors import StoreError

MOUNTS = Path("/proc/self/mountinfo")
# Those on which several machines may have one file open while each maps a copy of its own.
APART = frozenset(
    "nfs nfs4 cifs smb3 smbfs ncpfs afs coda fuse.sshfs fuse.s3fs fuse.gcsfuse fuse.rclone fuse.glusterfs".split()
)


def file_system(path: Path) -> str | None:
    """The type of the file system that ``path``, which must be resolved, lies on; None if the system does not tell."""
    try:
        lines = MOUNTS.read_bytes().decode(errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return None
    found, longest = None, -1
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        depth = len(mounted.parts)
        if depth >= longest and path.is_relative_to(mounted):  # of several on one point the last one is seen
            found, longest = after.split(" ")[0], depth
    return found


def is_apart(path: Path) -> bool:
    """Whether another machine may see another state of a file there than this one."""
    return file_system(path.resolve()) in APART


def check_writable(path: Path) -> None:
    """Raises StoreError for a path where what is written cannot be relied on."""
    if is_apart(path):
        raise StoreError(
            f"{path} lies on a network file system ({file_system(path.resolve())}), where processes may see different "
            "states of one file, and a store can be damaged by writing. Keep it on a disk of this machine; a copy that "
            'nobody writes can be read from there with mode="r".'
        )
