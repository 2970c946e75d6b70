"""Gradient balancing for several objectives."""
