"""What lies where in a checkpoint. Touches no file."""
