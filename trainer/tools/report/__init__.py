"""`perdure report`: what a run did, proven from its ledger."""
