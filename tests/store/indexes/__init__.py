"""Indexes as caches of the store."""
