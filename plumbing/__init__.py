"""What every run needs and no lesson is about: processes, their end, shards, flags."""
