"""Text to token ids, and token ids to batches: corpora, tokenizers, chat."""
