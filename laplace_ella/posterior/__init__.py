"""Basis, K×K posterior, likelihoods and links: frozen values and pure functions."""
