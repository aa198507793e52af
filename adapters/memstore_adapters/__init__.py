"""The adapters that come with memstore, one file per model family."""
