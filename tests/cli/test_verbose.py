"""``memstore -v``: what is done is said on standard error, and nothing without it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import memstore
from tests.cli.conftest import Run


def test_v_says_what_is_done_and_leaves_nothing_behind(run: Run, library: Path) -> None:
    quiet = run("remove", "genesis", "--store", library)
    assert quiet.stderr == ""
    said = run("-v", "remove", "ruth[1]", "--store", library)
    assert said.stdout == "Removed ruth[1].\n"
    assert "INFO memstore.pending: removed memory 'ruth[1]' from" in said.stderr
    logger = logging.getLogger("memstore")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET


def test_verify_takes_a_model_for_a_repair_alone(run: Run, library: Path) -> None:
    assert run("verify", "--store", library, "--model", "anything").exit_code == 2


def test_verify_repairs_a_catalog(run: Run, library: Path) -> None:
    (library / "catalog" / "data.mdb").write_bytes(b"\0" * 8192)
    broken = run("list", "--store", library)
    assert broken.exit_code == 1 and "memstore verify --repair" in broken.stderr
    mended = run("verify", "--repair", "--store", library)
    assert mended.exit_code == 0, mended.stderr
    assert mended.stdout == "genesis is intact.\nruth[1] is intact.\n"
    assert "were restored from copies" in mended.stderr
    assert run("verify", "--store", library).exit_code == 0


def test_verify_names_what_a_lost_catalog_left(run: Run, library: Path) -> None:
    with memstore.open(library) as store:
        lost = library / "memories" / store["ruth[1]"].manifest.id
    (lost / "record").unlink()
    (library / "catalog" / "data.mdb").unlink()
    mended = run("verify", "--repair", "--store", library, "--json")
    assert mended.exit_code == 1 and json.loads(mended.stdout)["strays"] == [str(lost)]
    told = run("verify", "--store", library)
    assert (told.exit_code, told.stdout) == (1, "genesis is intact.\n")
    assert f"Note: {lost} belongs to no memory" in told.stderr.replace("\n", "") and "--repair" not in told.stderr
    assert run("verify", "genesis", "--store", library).exit_code == 0
    assert lost.is_dir()  # nothing but a hand deletes it
    shutil.rmtree(lost)
    assert run("verify", "--store", library).exit_code == 0


def test_verify_says_what_a_repair_needs(run: Run, library: Path, model: Path) -> None:
    for data in library.glob("memories/*/data.mdb"):
        whole = bytearray(data.read_bytes())
        whole[len(whole) // 2 :: 4096] = bytes(byte ^ 1 for byte in whole[len(whole) // 2 :: 4096])
        data.write_bytes(whole)
    told = run("verify", "genesis", "--repair", "--store", library)
    assert told.exit_code == 1 and "--repair --model MODEL" in told.stderr
    mended = run("verify", "--repair", "--model", model, "--store", library)
    assert mended.exit_code == 0, mended.stderr
    assert "It was read anew, to the bytes it had." in mended.stdout
    assert run("verify", "--store", library).exit_code == 0
