"""The interfaces of other libraries, backed by this package. Each imports its library itself."""
