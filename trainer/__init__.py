"""What one rank does: recipe → model, data, parallel strategy → the loop → metrics."""
