"""From a loader to one frozen fit: sampling, curvature, stopping, checkpoints."""
