"""How an attached model reads: one file for each kind of memory, and what they share."""
