"""The errors that memstore raises on purpose; each message says what to do."""


class MemstoreError(Exception):
    """Base of every error that memstore raises on purpose."""


class AssetError(MemstoreError):
    """A model or a text that the demo, the tests or the benchmarks need cannot be had."""
