"""What is trained: a decoder, a model of the user's own, or KGAT."""
