"""`perdure data prepare`: turns text into token shards."""
