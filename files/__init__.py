"""Weights on disk, in the formats of everybody: ours, Meta's, Hugging Face's, PEFT's."""
