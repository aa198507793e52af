"""What was read: for each generated token the passages that held its attention."""

from memstore.provenance.ledger import Ledger, Seen
from memstore.provenance.report import DocumentShare, Fold, Passage, Provenance, Reading, Retrieved

__all__ = ["DocumentShare", "Fold", "Ledger", "Passage", "Provenance", "Reading", "Retrieved", "Seen"]
