"""Adapters that come with memstore: one file a family, found through the entry-point group ``memstore.adapters``."""
