"""The command line of `perdure`: one module per command, which parses arguments and calls tools."""
