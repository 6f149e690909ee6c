"""What every run needs and no lesson is about: processes, flags, tokenizers, foreign files."""
