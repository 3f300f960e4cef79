"""`perdure replay`: steps of a run recomputed, compared with its ledger, and explained."""
