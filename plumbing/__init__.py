"""What knows no model: processes, their endings, shards, the parser of flags."""
