"""Derivatives of the model: rows of the Jacobian and features J(x)V."""
