"""One technique a file: ways to train larger or faster."""
