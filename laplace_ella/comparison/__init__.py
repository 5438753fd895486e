"""All methods of the family on the same data, in one table."""
