"""What an operator reads in the log: each event that changes a store or a model, by the name of the memory."""

from __future__ import annotations

import logging
import subprocess

import pytest

import memstore
from memstore import describe, sources, syncing
from memstore.errors import IndexNotice
from tests import kept, tiny
from tests.models import build, read, tokens
from tests.store import making, test_growing

LINE = "In the beginning was the Word, and the Word was with God.\n"


@pytest.fixture(autouse=True)
def everything(caplog):
    for name in ("memstore", "memstore_backends"):
        caplog.set_level(logging.DEBUG, name)


@pytest.fixture(scope="module")
def llama():
    return tiny.llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def said(caplog):
    """What was logged since this was last asked, at INFO and above, without the names of modules."""

    def since():
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        caplog.clear()
        return lines

    return since


def test_reading_a_document_is_logged(library, llama, said, caplog):
    memory = library.encode(llama, input_ids=tokens(600), name="doc", window=64)
    assert [line for line in caplog.messages if "committed" in line] == ["memory 'doc': block 1 of 1 is committed"]
    assert said() == [
        f"memory 'doc' is begun: 600 tokens in {library.path}",
        f"wrote memory 'doc': 600 tokens in {memory.manifest.num_blocks} blocks",
    ]
    library.encode(llama, input_ids=tokens(600), name="doc", window=64)
    assert said() == ["memory 'doc' holds this document already"]


def test_an_interruption_and_going_on_are_logged(library, llama, said, monkeypatch):
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)  # blocks of 256 tokens

    def stop(done, total):
        if done > 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.encode(llama, input_ids=tokens(1000), name="doc", window=64, progress=stop)
    assert said()[-1] == "memory 'doc' is left after 512 of 1000 tokens (KeyboardInterrupt)"
    library.encode(llama, input_ids=tokens(1000), name="doc", window=64)
    assert said() == ["memory 'doc' goes on after 512 of 1000 tokens", "wrote memory 'doc': 1000 tokens in 4 blocks"]
    with pytest.raises(KeyboardInterrupt):
        library.encode(llama, input_ids=tokens(1000), name="other", window=64, progress=stop)
    said()
    del library["other"]
    assert said() == [f"gave up the unfinished memory 'other' in {library.path}"]


def test_an_update_is_logged(library, llama, tokenizer, said):
    library.update(llama, tokenizer, LINE * 10, name="doc", window=64)
    said()
    library.update(llama, tokenizer, LINE * 10, name="doc", window=64)
    assert said() == ["memory 'doc' holds this document already"]
    update = library.update(llama, tokenizer, LINE * 9 + "The end.", name="doc", window=64)
    assert 0 < update.num_read < update.num_windows
    size = update.memory.num_tokens
    assert said() == [
        f"memory 'doc' is begun: {size} tokens in {library.path}",
        f"wrote memory 'doc': {size} tokens in 1 blocks in the place of an earlier version",
        f"memory 'doc': {update.num_read} of {update.num_windows} windows were read again",
    ]


def test_a_removal_is_logged_by_name(library, said):
    making.write(library, "esther")
    said()
    del library["esther"]
    assert said() == [f"removed memory 'esther' from {library.path}"]


def test_indexes_are_logged(library, said, tmp_path, monkeypatch):
    kept.install(tmp_path / "plugins", monkeypatch)
    model = build("bart")
    memory = read(library, model, length=300)
    said()
    with pytest.warns(IndexNotice), memstore.attach(model, memory, index="kept"):
        pass
    asked, done = said()[:2]
    assert asked == "the index 'kept' of memory 'doc' is built, because none was kept"
    assert done.startswith(f"kept the index 'kept' of memory 'doc' in {library.path}")
    with memstore.attach(model, memory, index="kept"):
        assert said()[0] == "loaded the index 'kept' of memory 'doc'"
    folder = done.rpartition(" in ")[2]
    library.reindex("doc", "kept")
    assert f"dropped {folder}, which no index of memory 'doc' uses" in said()


def test_attaching_adding_and_detaching_are_logged(library, said, caplog):
    model = build("bart")
    first, second = (read(library, model, name=name, length=length) for name, length in (("one", 300), ("two", 200)))
    said()
    with memstore.attach(model, first) as attached:
        assert said() == ["attached to BartForConditionalGeneration: 1 memories, 300 tokens"]
        attached.add(second)
        assert caplog.messages[-1] == "rows read [['one', 'two']]"
        assert said() == ["attached to BartForConditionalGeneration: 2 memories, 500 tokens"]
        attached.remove(first)
        assert said() == ["attached to BartForConditionalGeneration: 1 memories, 200 tokens"]
    assert said() == ["detached from BartForConditionalGeneration"]


def test_export_and_import_are_logged(library, said, tmp_path):
    memory = making.write(library, "esther")
    said()
    (folder,) = library.export(tmp_path / "out")
    assert said() == [f"exported memory 'esther' to {folder}"]
    library.export(tmp_path / "out")
    assert said() == [f"memory 'esther' is in {folder} already"]
    with memstore.open(tmp_path / "other") as other:
        other.import_from(tmp_path / "out")
        assert said()[-1] == f"imported memory 'esther' from {folder}"
        assert other["esther"].manifest.digest == memory.manifest.digest
        other.import_from(tmp_path / "out")
        assert said() == [f"memory 'esther' is in {other.path} already"]


def test_what_a_folder_holds_is_logged(library, llama, tokenizer, said, tmp_path):
    for name in ("same", "gone", "new", "other"):
        (tmp_path / f"{name}.txt").write_text(LINE)
    found = {document.name: document for document in syncing.compare(library, sources.Folder(str(tmp_path))).added}
    for name in ("same", "gone"):
        sources.refresh(library, llama, tokenizer, found[name], LINE, folder=sources.Folder(str(tmp_path)))
    library.encode(llama, tokenizer, "Of no file.", name="other")
    (tmp_path / "gone.txt").unlink()
    said()
    syncing.compare(library, sources.Folder(str(tmp_path)))
    passed, left, counts = said()
    assert passed.startswith(f"{tmp_path}: passed over ")  # the files of the store, which lies in it
    assert left.startswith(f"{tmp_path / 'other.txt'} is left as it is: ")
    assert counts == f"{tmp_path}: 1 added, 0 changed, 1 unchanged, 1 removed, 1 failed"


def test_damage_is_logged(library, said):
    memory = making.write(library, "esther")
    data = library.path / "memories" / memory.manifest.id / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:-4096])
    said()
    (result,) = library.verify()
    assert said() == [
        f"checking every record of 1 memories of {library.path}",
        f"memory 'esther': {result.problems[0]}",
    ]


def test_a_killed_reader_and_a_damaged_lock_file_are_logged(library, said):
    process = making.child(test_growing.READ, library.path / "catalog", stdin=-1)
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    process.kill()
    process.communicate()
    said()
    making.write(library)
    assert said()[0] == f"cleared 1 readers of {library.path / 'catalog'}, which were killed"
    library.close()
    lock = library.path / "catalog" / "lock.mdb"
    lock.write_bytes(b"\1" * lock.stat().st_size)
    memstore.open(library.path).close()
    assert said() == [f"{lock} was damaged, and is made anew: nobody used it"]


def test_a_catalog_that_grows_is_logged(tmp_path, said, monkeypatch):
    monkeypatch.setattr("memstore_backends.lmdb_catalog.CATALOG_MAP", 64 << 10)
    with memstore.open(tmp_path / "small") as store:
        store.records.commit({b"x%d" % i: bytes(1000) for i in range(100)})
        assert f"the map of {store.path / 'catalog'} was full and has been doubled" in said()


WARNS = """
import sys
import memstore
from tests.store import making
with memstore.open(sys.argv[1]) as store:
    data = store.path / "memories" / making.write(store).manifest.id / "data.mdb"
    data.write_bytes(data.read_bytes()[:-4096])
    print([result.ok for result in store.verify()])
"""


def test_a_program_that_asks_for_no_log_sees_none(tmp_path):
    """Not even the warnings, which logging by itself writes to standard error."""
    process = making.child(WARNS, tmp_path / "library", stderr=subprocess.PIPE)
    assert process.communicate(timeout=300) == ("[False]\n", "")
