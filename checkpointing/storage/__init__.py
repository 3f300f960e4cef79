"""Where steps lie: local and shared filesystems, object stores; which there are, which stay."""
