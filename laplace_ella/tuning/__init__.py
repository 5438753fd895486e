"""Choice of hyperparameters from cached features."""
