"""What a step will hold, send and take."""
