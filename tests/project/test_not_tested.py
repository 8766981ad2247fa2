"""The end of a run names what the machine lacks."""

from pathlib import Path


def test_summary_names_what_the_machine_lacks(pytestconfig, monkeypatch, tmp_path):
    conftest = str(Path(__file__).resolve().parents[1] / "conftest.py")
    plugins = pytestconfig.pluginmanager.get_plugins()
    hooks = next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == conftest)
    lines, titles = [], []

    class Reporter:
        section, line = titles.append, lines.append

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("KVCACHE_SHARED", str(tmp_path))
    hooks.pytest_terminal_summary(Reporter)
    assert titles == ["not tested on this machine"]
    assert [line.partition(":")[0] for line in lines] == [
        "alert rules and the text of /metrics",
        "the valkey tier",
        "hits on recorded traffic",
    ]
    for name in ("promtool", "redis-server"):
        (tmp_path / name).touch(0o755)
    (tmp_path / "traces").mkdir()
    hooks.pytest_terminal_summary(Reporter)
    assert len(titles) == 1
