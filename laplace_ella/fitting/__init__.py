"""From a loader to a fit."""
