"""The command line of `perdure`: a module for each command, or for a few related ones, which parses
arguments and calls tools."""
