"""A transformer reads a document once; what it read is kept on disk and attached to the same model later."""

__version__ = "0.1.0"
