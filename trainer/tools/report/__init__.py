"""`perdure report`: shows what a run did, and proves it from its ledger."""
