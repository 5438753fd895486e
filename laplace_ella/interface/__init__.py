"""laplace-torch's interface over a `Fit`, layer by layer: state, then predictions."""
