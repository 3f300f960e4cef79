"""`perdure data prepare`: text → shards of tokens."""
