"""Cached features, searches and evidence: choosing what a fit leaves open."""
