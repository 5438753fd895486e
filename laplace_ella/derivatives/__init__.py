"""The model as a function of its parameters: rows cᵀJ(x) and features J(x)V."""
