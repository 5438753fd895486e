"""The posterior on a subspace of the weights, and its predictions."""
