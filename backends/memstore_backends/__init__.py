"""The backends that come with memstore, one file each."""
