"""Containers of tensors, checks, memory and what is put back after a call."""
