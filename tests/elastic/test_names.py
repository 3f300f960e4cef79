"""What nodes are called."""

import os
import socket

from elastic.group.member import node_name


def test_two_agents_never_have_one_name():
    """Not even two of one host, address and process id, as in two containers of a host."""
    names = {node_name("10.0.0.7") for _ in range(8)}
    assert len(names) > 1
    assert all(name.startswith(f"{socket.gethostname()}/10.0.0.7/{os.getpid()}-") for name in names)
