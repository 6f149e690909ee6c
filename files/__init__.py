"""Weights on disk, in the formats of all who publish them."""
