"""What runs on one machine."""
