"""The store: keeping, finding, resuming, removing, and noticing damage."""
