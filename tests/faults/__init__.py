"""Faults: what is done to a store here must never cost what was complete, nor pass for it."""
