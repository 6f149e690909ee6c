"""What measures and predicts: a file for each command of bench.py, and what they share."""
