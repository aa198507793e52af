"""Tests with real weights, and what they need."""
