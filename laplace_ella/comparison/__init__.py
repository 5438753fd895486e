"""Many methods on one network, one table."""
