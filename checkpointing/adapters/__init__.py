"""Adapters: interfaces of other libraries that save and load with this package. Only the module of
an adapter imports its library."""
