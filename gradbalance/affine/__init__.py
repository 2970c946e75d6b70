"""Losses that are affine in per-sample terms: K objectives, one backward pass for any weighting of them."""

from gradbalance.affine.loss import AffineLoss

__all__ = ["AffineLoss"]
