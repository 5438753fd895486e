"""Small helpers that every room may use: batches, checks, layouts, restored state."""
