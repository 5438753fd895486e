"""What the example scripts share: data, networks, cached features, result files."""
