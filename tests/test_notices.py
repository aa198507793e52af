"""Warnings point at the line of the program that led to them, however deep inside they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
from memstore.errors import FingerprintWarning, IndexNotice, StoreBusyError
from tests.models import build, read


def lines(caught):
    return {warning.filename for warning in caught}


def test_a_fingerprint_that_differs(library):
    model = build("bart")
    one, two = read(library, model, "one"), read(library, model, "two")
    with torch.no_grad():
        model.get_encoder().layers[0].fc1.weight.add_(1)
    with pytest.warns(FingerprintWarning) as attaching:
        attachment = memstore.attach(model, one, strict=False)
    with attachment as attached, pytest.warns(FingerprintWarning) as adding:
        attached.add(two)
    assert lines(attaching) == lines(adding) == {__file__}


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_an_index_that_is_built(library, family):
    model = build(family)
    memories = [read(library, model, name, window=64, length=700) for name in ("one", "two")]
    options: dict[str, Any] = {"top_k": 8} if family == "bart" else {"budget": 64}
    attachment = memstore.attach(model, memories[0], index="faiss-flat", **options)
    with pytest.warns(IndexNotice) as entering:
        attachment.__enter__()
    with pytest.warns(IndexNotice) as adding:
        attachment.add(memories[1])
    attachment.__exit__(None, None, None)
    assert lines(entering) == lines(adding) == {__file__}


def test_waiting_for_another_process(library, monkeypatch):
    """The notice is given inside a context manager of the library."""
    model = build("bart")
    memory = read(library, model, window=64, length=700)
    real = library.records.lock
    monkeypatch.setattr(library.records, "lock", lambda key, wait: real(key, wait=True) if wait else busy())
    with pytest.warns(IndexNotice, match="Waiting") as waiting:
        library.reindex(memory.name, backend="faiss-flat")
    assert lines(waiting) == {__file__}


def busy():
    raise StoreBusyError("Another process has it.")
