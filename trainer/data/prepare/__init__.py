"""Text → shards of tokens: `perdure data prepare`."""
