"""The nodes of a job: membership, the store that they share, and what a node must be to join."""
