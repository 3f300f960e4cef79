"""From tensors to a committed step."""
