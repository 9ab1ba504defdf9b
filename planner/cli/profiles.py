"""``plan profiles``: the clusters that ship, and where the numbers of one come from."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.cli.terminal import answer_console, write_answer
from planner.hardware.spec import Provenance
from planner.units import GIB, TERA


@click.group(invoke_without_command=True)
@click.option("--no-color", is_flag=True, help="No colour.")
@click.pass_context
def profiles_command(context: click.Context, *, no_color: bool) -> None:
    """List the clusters that ship, or show where the numbers of one come from."""
    context.obj = answer_console(no_color=no_color)
    if context.invoked_subcommand is None:
        context.invoke(list_command)


@profiles_command.command("list")
@click.pass_obj
def list_command(console: Console) -> None:
    """List the clusters that ship."""
    from planner.hardware.profiles import list_clusters, load_cluster

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cluster", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("TFLOP/s", justify="right", no_wrap=True)
    table.add_column("what it is")
    for name in list_clusters():
        device = load_cluster(name, gpus=1).device
        peak_flop_per_s = max(device.peak_flop_per_s.values())
        table.add_row(
            name,
            f"{device.memory_bytes / GIB:.1f}",
            f"{peak_flop_per_s / TERA:.4g}",
            Text(str(_read(_cluster_file(name)).get("description", ""))),
        )
    note = (
        "GiB: memory of one device; TFLOP/s: its highest dense matmul peak. "
        "For your own cluster: plan profiles new NAME --like CLUSTER."
    )
    write_answer(console, [table, Text(note, "dim")])


@profiles_command.command("new")
@click.argument("name", metavar="NAME")
@click.option("--like", metavar="CLUSTER", required=True, help="Shipped cluster to begin with.")
@click.option("--force", is_flag=True, help="Replace the files.")
@click.pass_obj
def new_command(console: Console, name: str, *, like: str, force: bool) -> None:
    """Write NAME.toml and NAME-device.toml for a cluster of your own, to put its numbers in."""
    from planner.hardware.profiles import load_cluster
    from planner.hardware.template import template_files
    from planner.report.folder import check_file, write_file

    files = {Path(each): text for each, text in template_files(name, like=like).items()}
    for file in files:
        check_file(file, option="NAME", force=force)
    for file, text in files.items():
        write_file(file, text, option="NAME", force=force)
    cluster_file = next(iter(files))
    load_cluster(str(cluster_file), gpus=1)
    note = (
        f"Put your numbers into them, then: plan MODEL --gpus N --cluster {cluster_file}. A plain "
        "number counts as stated by you; its comment says what it was and where that came from."
    )
    write_answer(console, [Text(f"Wrote  {'  '.join(map(str, files))}"), Text(note, "dim")])


@profiles_command.command("show")
@click.argument("name", metavar="NAME")
@click.pass_obj
def show_command(console: Console, name: str) -> None:
    """Show every number of a cluster, how it came to be and its source."""
    from planner.hardware.profiles import load_cluster

    load_cluster(name, gpus=1)
    file = _cluster_file(name)
    cluster = _read(file)
    links = cluster["links"]
    assert isinstance(links, list)
    device = _read(_device_file(str(cluster["device"]), file))
    sections = [_section(f"Cluster {cluster['name']}", cluster)]
    sections.extend(_section(f"Link {link['name']}", link) for link in links)
    host = cluster.get("host")
    if isinstance(host, dict):
        sections.append(_section("Host, of each node; its link of each GPU", host))
    sections.append(_section(f"Device {device['name']}", device))
    errors = device.get("step_time_errors", [])
    assert isinstance(errors, list)
    sections.extend(_section(f"Errors of runs, axes {each['axes']}", each) for each in errors)
    sections.append(_of_the_script())
    write_answer(console, sections)


def _of_the_script() -> Text:
    """What the code of the emitted script adds to a cluster's numbers in plans."""
    from planner.framework.script import SCRIPT
    from planner.hardware.profiles import PROFILES_FOLDER

    script = _read(PROFILES_FOLDER / "frameworks" / f"{SCRIPT}.toml")
    return _section("The emitted script, on any cluster", script)


def _section(title: str, content: Mapping[str, object]) -> Text:
    """Show each number with its provenance, and its source below."""
    text = Text(title, "bold")
    if "description" in content:
        text.append(f"\n{content['description']}", "not bold")
    for key, value, provenance, source in _numbers(content):
        text.append(f"\n  {key} = {value}", "not bold").append(f"  {provenance}", "not bold cyan")
        text.append(f"\n      {source}", "not bold dim")
    return text


def _numbers(content: Mapping[str, object]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, value, provenance and source of each number."""
    for key, entry in content.items():
        if isinstance(entry, dict) and "value" in entry:
            value = str(entry["value"])
            yield key, value, str(entry.get("provenance", "")), str(entry.get("source", ""))
        elif key != "format" and isinstance(entry, int | float):
            yield key, str(entry), Provenance.STATED, "a plain number"


def _cluster_file(name: str) -> Path:
    """Find the file of a cluster that is known to be there."""
    from planner.hardware.profiles import PROFILES_FOLDER, list_clusters

    if name in list_clusters():
        return PROFILES_FOLDER / "clusters" / f"{name}.toml"
    return Path(name).expanduser()


def _device_file(name: str, cluster_file: Path) -> Path:
    from planner.hardware.profiles import PROFILES_FOLDER, list_devices

    if name in list_devices():
        return PROFILES_FOLDER / "devices" / f"{name}.toml"
    return cluster_file.parent / name


def _read(file: Path) -> dict[str, object]:
    return tomllib.loads(file.read_text(encoding="utf-8"))
