"""Draw the generated pictures of the documentation into docs/_static.

    python docs/pictures.py TRACES

TRACES is a folder with `mooncake_conversation.jsonl` and `agentic_coding.jsonl.gz`. Simulated figures come from
`kvcache plan`, which this script runs. Measured figures are read from the tables of the pages. The pictures of
`kvcache top` and of the dashboard show managers that serve generated chats.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter
    from rich.console import Console
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is missing: pip install '.[cli,plot]'")

from kvcache.cli.frames import History, read_socket
from kvcache.cli.top import view
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.dashboard import dashboard
from kvcache.exporters.status import StatusServer
from kvcache.lab.report.style import INK, MEDIA_COLOURS, POLICY_COLOURS, caption, new_figure, plain_axes, save
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.simulate.tiered import PatientManager
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.keys import KeyMaker
from kvcache.metrics import HistogramData
from kvcache.tiers.memory import MemoryOptions, MemoryTier

DOCS = Path(__file__).parent
STATIC = DOCS / "_static"
MAX_BYTES = 60_000
CHATS, AGENTS = "mooncake_conversation.jsonl", "agentic_coding.jsonl.gz"
STACKS = ["--model", "llama-3.1-8b", "--policy", "gittins", "--memory", "256GiB", "--tier", "4TiB@6GB/s"]
WINDOW = 5  # frames that a rate spans
HOUR_S, FRAME_S = 3600, 60
PANELS = {
    "Hit rate by medium": PercentFormatter(1, 0),
    "Tokens spared": EngFormatter(),
    "Host blocks": EngFormatter(),
    "Tier bytes": EngFormatter("B"),
    "Stored, loaded and evicted": EngFormatter("B/s"),
    "Tier bandwidth": EngFormatter("B/s"),
}
TOP = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#1d1f21"/>
<g transform="translate(14, 14)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main(traces: Path) -> None:
    """Draw every picture."""
    # Text stays text: files are small, and equal input gives equal files.
    fonts = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvcache", **fonts})
    draw_policies(traces)
    draw_ttft(traces)
    draw_bookkeeping()
    draw_copies()
    draw_top()
    draw_dashboard()
    for picture in sorted(STATIC.glob("*.svg")):
        size = picture.stat().st_size
        print(f"{picture.name}: {size:,} bytes")
        if size > MAX_BYTES:
            raise SystemExit(f"{picture} has more than {MAX_BYTES:,} bytes")


def plan(*words: str) -> None:
    """Run `kvcache plan` in a process of its own, which draws with the settings of this one."""
    code = (
        "import sys, matplotlib; matplotlib.rcParams.update({'svg.fonttype': 'none', 'svg.hashsalt': 'kvcache'});"
        "from kvcache.cli import main; sys.argv[0] = 'kvcache'; main()"
    )
    subprocess.run([sys.executable, "-c", code, "plan", *words, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def draw_policies(traces: Path) -> None:
    """Draw the hits of policies over capacity, as the commands of docs/howto/which-policy.md."""
    page = (DOCS / "howto" / "which-policy.md").read_text()
    for line in re.findall(r"^kvcache plan (.*--save policies-.*)$", page, re.MULTILINE):
        name, *words = line.split()
        plan(str(traces / name), *words[:-1], str(STATIC / words[-1]))


def draw_ttft(traces: Path) -> None:
    """Draw the simulated time to first token without a cache, with host memory, and with a disk below it."""
    figure = new_figure(9.0, 3.4)
    panels = figure.subplots(1, 2)
    with tempfile.TemporaryDirectory() as folder:
        for axes, name, title in zip(panels, (AGENTS, CHATS), ("Coding agents", "Chats"), strict=True):
            target = Path(folder) / "plan.json"
            plan(str(traces / name), *STACKS, "--json", str(target))
            found = json.loads(target.read_text())
            with_disk = [cell["serving"] for cell in found["cells"] if cell["tiers"]]
            memory = [cell["serving"] for cell in found["cells"] if not cell["tiers"]]
            shown = [found["no_cache"], *memory, *with_disk]
            draw_bars(axes, ["no cache", "256 GiB of\nhost memory", "and a disk\nof 4 TiB"], shown)
            engines = found["no_cache"]["num_engines"]
            axes.set_title(f"{title}, {engines} engines", loc="left", fontsize=10)
    footnote = f"kvcache plan {CHATS} (or {AGENTS}) {' '.join(STACKS)}"
    caption(figure, "Simulated time to first token, median in seconds", footnote)
    save(figure, str(STATIC / "ttft.svg"))


def draw_bars(axes: mpl.axes.Axes, names: list[str], shown: list[dict[str, float]]) -> None:
    """Draw the median of each stack, labelled with its 99th percentile too."""
    plain_axes(axes)
    values = [one["ttft_p50_s"] for one in shown]
    axes.bar(names, values, width=0.5, color=[INK, *MEDIA_COLOURS[:2]])
    for i, one in enumerate(shown):
        text = f"{one['ttft_p50_s']:.2f} s\n(99 %: {one['ttft_p99_s']:.1f} s)"
        # White behind the numbers, so that no line of the grid crosses them.
        blank = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(
            text, (i, values[i]), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=9, bbox=blank
        )
    axes.tick_params(labelsize=9)
    axes.set_ylim(0, max(values) * 1.3)


def row_of(page: str, text: str) -> list[float]:
    """Return the numbers in the second column of the row of a table that begins with `text`."""
    for line in (DOCS / page).read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[0].startswith(text):
            return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\.?\d*", cells[1])]
    raise SystemExit(f"{page} has no row {text!r}")


def draw_bookkeeping() -> None:
    """Draw the bookkeeping of a key through vLLM's interface, and the cost of gittins over lru."""
    ours, theirs = row_of("performance.md", "bookkeeping through vLLM's interface")
    figure = new_figure(9.0, 3.2)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        plain_axes(axes)
    left.bar(["vLLM 0.32's manager", "kvcache, lru"], [theirs, ours], color=[INK, POLICY_COLOURS["lru"]], width=0.5)
    left.set_ylim(0, theirs * 1.2)
    left.yaxis.set_major_formatter("{x:,.0f}")
    for i, value in enumerate((theirs, ours)):
        left.annotate(f"{value:,.0f} ns", (i, value), (0, 3), textcoords="offset points", ha="center")
    left.set_title("Bookkeeping of a key, through vLLM's interface", loc="left", fontsize=10)
    chats, agents = (row_of("performance.md", f"`gittins` over `lru` on {one}") for one in ("chats", "agents"))
    names = ["3,000", "10,000", "30,000", "500", "2,000", "8,000"]
    bars = right.bar(range(6), chats + agents, color=POLICY_COLOURS["gittins"], width=0.6)
    for bar in bars[3:]:  # paler, so that the two traces differ
        bar.set_facecolor("#EA9F66")
    right.axhline(1.0, color=INK, linewidth=1)
    for i, value in enumerate(chats + agents):
        right.annotate(f"{value:.2f}", (i, value), (0, 3), textcoords="offset points", ha="center")
    right.set_xticks(range(6), names, fontsize=9)
    right.set_ylim(0, 2)
    right.set_xlabel("blocks: three capacities of chats, three of agents", fontsize=9)
    right.set_title("Time of gittins over lru", loc="left", fontsize=10)
    caption(figure, "", "Measured; commands and machine are in the table of this page.")
    save(figure, str(STATIC / "bookkeeping.svg"))


def draw_copies() -> None:
    """Draw how fast scattered copies are beside one large one, and the rates of the disk tier."""
    copies = row_of("performance.md", "scattered blocks of 1 MiB")
    disk = row_of("performance.md", "disk tier, 2 MiB blocks")
    figure: Figure = new_figure(9.0, 2.8)
    left, right = figure.subplots(1, 2)
    for axes, values, title, unit in (
        (left, copies, "Scattered blocks of 1 MiB: rate over one large memcpy", ""),
        (right, disk, "Disk tier, blocks of 2 MiB, checksummed", " GB/s"),
    ):
        plain_axes(axes)
        axes.bar(["store", "load"], values, color=MEDIA_COLOURS[0], width=0.5)
        axes.set_ylim(0, max(*values, 1.0) * 1.25)
        for i, value in enumerate(values):
            axes.annotate(f"{value:g}{unit}", (i, value), (0, 3), textcoords="offset points", ha="center")
        axes.set_title(title, loc="left", fontsize=10)
    caption(figure, "", "Measured on two cores of a virtual machine without a GPU; the commands are in the table.")
    save(figure, str(STATIC / "copies.svg"))


def draw_top() -> None:
    """Draw a frame of `kvcache top` of a manager with a tier that serves generated chats."""
    host_blocks = np.zeros((1000, 64 << 10), np.uint8)
    manager = PatientManager(16, 1000, [MemoryTier(MemoryOptions(4 * host_blocks.nbytes), host_blocks)], "lru")
    telemetry = Telemetry(manager, block_bytes=host_blocks.shape[1], time_calls=True)
    replay, make_keys = Replay(manager), KeyMaker()
    with tempfile.TemporaryDirectory() as folder:
        server = StatusServer(telemetry, f"{folder}/engine.sock")
        path, history = Path(server.address), History()
        history.add(read_socket(path))
        for number, chat in zip(itertools.count(), ChatWorkload(num_requests=600, seed=1)):
            replay.step(chat, make_keys(chat.hash_ids))
            if number % 100 == 99:
                time.sleep(0.2)
                history.add(read_socket(path))
        console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
        console.print(view("/run/user/1000/kvcache-engine.sock", history))
        telemetry.close()
    manager.shutdown()
    text = console.export_svg(code_format=TOP, unique_id="top")
    (STATIC / "top.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def draw_dashboard() -> None:
    """Draw panels of the dashboard over an hour of generated chats, which a manager with a tier serves in seconds."""
    host_blocks = np.zeros((2000, 64 << 10), np.uint8)
    arrivals = ReplayClock()
    manager = PatientManager(16, 2000, [MemoryTier(MemoryOptions(4 * host_blocks.nbytes), host_blocks)], clock=arrivals)
    telemetry = Telemetry(manager, block_bytes=host_blocks.shape[1], time_calls=True)
    replay, make_keys, snapshots, taken_s = Replay(manager, arrivals=arrivals), KeyMaker(), [], []
    for chat in ChatWorkload(num_requests=100_000, seed=1, chats_per_s=0.1):
        if chat.arrival_s > HOUR_S:
            break
        replay.step(chat, make_keys(chat.hash_ids))
        if chat.arrival_s >= len(snapshots) * FRAME_S:
            snapshots.append(telemetry.snapshot())
            taken_s.append(chat.arrival_s)
    telemetry.close()
    manager.shutdown()
    times = np.array(taken_s)
    frames = [{f"kvcache_{one.name}": one.value for one in snapshot.samples()} for snapshot in snapshots]
    figure = new_figure(11.0, 5.2)
    panels = {panel["title"]: panel for panel in dashboard()["panels"]}
    for axes, (title, unit) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        plain_axes(axes)
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        for target in panels[title]["targets"]:
            label = re.sub(r",? ?\{\{(instance|tier).*", "", target["legendFormat"]).replace("{{medium}}", "tier")
            axes.plot(times[WINDOW:] / 60, values_of(target["expr"], times, frames), linewidth=1, label=label)
        axes.locator_params(nbins=4)
        axes.yaxis.set_major_formatter(unit)
        axes.set_ylim(0)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7, frameon=False)
    footnote = "An hour of generated chats, by their arrival, in minutes. The tier is host memory."
    caption(figure, "Panels of the dashboard", footnote)
    save(figure, str(STATIC / "dashboard.svg"))


def values_of(expression: str, times: Any, frames: list[dict[str, Any]]) -> Any:
    """Evaluate an expression of the dashboard at each frame after the first `WINDOW`."""

    def all_of(name: str) -> Any:
        values = [frame[name.removesuffix("_total")] for frame in frames]
        return np.array([one.counts if isinstance(one, HistogramData) else one for one in values], float)

    def change(name: str) -> Any:
        return all_of(name)[WINDOW:] - all_of(name)[:-WINDOW]

    def quantile(share: float, name: str) -> Any:
        bounds = frames[-1][name].bounds
        return [HistogramData(bounds, tuple(one), 0.0).quantile(share) for one in change(name)]

    # One engine and one tier: a sum over labels is one value.
    plain = re.sub(r"\{[^}]*\}|(sum|max) by \([^)]*\) |on \([^)]*\) group_left \(\)| >=? 0", "", expression)
    plain = re.sub(r"rate\((\w+)\[[^]]*\]\)", r"rate('\1')", plain)
    plain = re.sub(r"histogram_quantile\(([\d.]+), \(rate\('(\w+)_bucket'\)\)\)", r"quantile(\1, '\2')", plain)
    plain = re.sub(r"(?<!')\b(kvcache_\w+)", r"gauge('\1')", plain)
    names = {
        "gauge": lambda name: all_of(name)[WINDOW:],
        "rate": lambda name: change(name) / (times[WINDOW:] - times[:-WINDOW]),
        "quantile": quantile,
    }
    return eval(plain, {"__builtins__": {}}, names)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
