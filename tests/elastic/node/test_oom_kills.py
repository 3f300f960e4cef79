"""What the kernel says of processes that it has killed for lack of memory."""

from elastic.node import vitals


def test_the_cgroup_counts_and_else_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(vitals, "CGROUPS", tmp_path)
    machine = vitals.oom_kills()
    assert machine >= 0
    events = vitals._cgroup() / "memory.events"
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert vitals.oom_kills() == 3
