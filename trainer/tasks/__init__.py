"""What is trained: a decoder, or a model of the user's own."""
