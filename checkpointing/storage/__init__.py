"""Storage of steps: local and shared filesystems, object stores; reading, retention."""
