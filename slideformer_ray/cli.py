"""The command `slideformer-ray`. Thin: it reads arguments, calls the package, prints what comes back.

Results go to stdout (`--json` for programs), everything else to stderr. Exit codes: 0 done, 1 failed, 2 the user's
input is wrong, 130 stopped by Ctrl-C, 143 stopped by SIGTERM. A mistake of the user's is one message; `--debug` adds
tracebacks and Ray's own output. torch, transformers and Ray are imported by the commands that need them, so that
`--help` is instant. Tested by tests/test_cli.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from slideformer_ray.config import GIB, ConfigError, RunConfig

if TYPE_CHECKING:
    from rich.console import Group

    from slideformer_ray.trainer import Summary, Trainer

DONE, FAILED, WRONG_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM

app = typer.Typer(
    help="Full-parameter fine-tuning of language models on one workstation GPU that cannot hold them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the file's: optimizer.eps=1e-6"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's own output.")]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between lines of progress where there is no terminal.")]


@app.command()
def quickstart(
    run_dir: Annotated[Path, typer.Option(help="An earlier quickstart there is replaced.")] = Path("runs/quickstart"),
    as_json: Json = False,
    log_every: LogEvery = 10,
    debug: Debug = False,
) -> None:
    """Fine-tune the 1M parameter model that the package ships: 100 steps, a minute on two cores."""
    with _exit_codes(debug):
        from slideformer_ray.data.quickstart import QUICKSTART_PROMPT, quickstart_config, quickstart_model_dir
        from slideformer_ray.generation import answer

        _clear_earlier_quickstart(run_dir, quickstart_model_dir())
        summary = _train(quickstart_config(run_dir), log_every, debug)
        assert summary.model_dir is not None
        before = answer(quickstart_model_dir(), QUICKSTART_PROMPT)
        after = answer(Path(summary.model_dir), QUICKSTART_PROMPT)
        if as_json:
            answers = {"prompt": QUICKSTART_PROMPT, "text_before": before, "text_after": after}
            _print_json(dataclasses.asdict(summary) | answers)
        else:
            from slideformer_ray.observe.report import field, summary_lines

            texts = [("prompt", QUICKSTART_PROMPT), ("before", before), ("after", after)]
            _print_lines([*summary_lines(summary), *(field(name, text) for name, text in texts)])


@app.command()
def train(
    config_file: ConfigFile,
    overrides: Overrides = None,
    log_every: LogEvery = 10,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a model."""
    with _exit_codes(debug):
        summary = _train(RunConfig.load(config_file, overrides or ()), log_every, debug)
        if as_json:
            _print_json(dataclasses.asdict(summary))
        else:
            from slideformer_ray.observe.report import summary_lines

            _print_lines(summary_lines(summary))


@app.command()
def plan(
    config_file: ConfigFile,
    overrides: Overrides = None,
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="Plan for a GPU with this much free memory.")] = None,
    ram_gib: Annotated[float | None, typer.Option(min=1, help="Plan for a machine with this much free RAM.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Plan for a machine with so many cores.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the bytes of every tier, before anything is allocated. Needs config.json, but neither weights nor data.

    Refuses (exit code 2) what cannot fit, and says which setting would mend it.
    """
    with _exit_codes(debug):
        from slideformer_ray.budget import DoesNotFit, resolve
        from slideformer_ray.machine import Machine
        from slideformer_ray.model.layers import describe_model, load_hf_config
        from slideformer_ray.observe.report import plan_lines, plan_notes, plan_record
        from slideformer_ray.shortfalls import check_disk

        config = RunConfig.load(config_file, overrides or ())
        machine = Machine.read(config.placement.device).like(gpu_gib=gpu_gib, ram_gib=ram_gib, cores=cores)
        hf_config = load_hf_config(config.model.path)
        spec = describe_model(hf_config, config.model.frozen)
        shortfalls: tuple[str, ...] = ()
        try:
            byte_plan = resolve(config, spec, hf_config.intermediate_size, machine)
        except DoesNotFit as error:
            byte_plan, shortfalls = error.plan, error.shortfalls
        notes = plan_notes(config, hf_config)
        if as_json:
            _print_json(plan_record(config, spec, machine, byte_plan, shortfalls, notes))
        else:
            _print_lines(plan_lines(config, spec, machine, byte_plan))
        for note in notes:
            _say(f"note: {note}")
        if shortfalls:
            raise ConfigError("\n".join(shortfalls))
        if gpu_gib is None and ram_gib is None:
            check_disk(config, byte_plan)


@app.command()
def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG.yaml KEY=VALUE", help="Without a file: the quickstart's model."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are compared.")] = 5,
    local: Annotated[
        bool,
        typer.Option(
            "--local/--ray", help="Run the tiers as threads of one process, or as Ray actors (slower to start)."
        ),
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare gradients, masters and overlap with plain PyTorch, on the config's own model and rows."""
    with _exit_codes(debug):
        config = _config_or_quickstart(list(arguments or ()))
        from slideformer_ray.observe.report import verify_lines
        from slideformer_ray.verify import verify as run_verify

        with _only_results_on_stdout(debug):
            report = run_verify(config, steps=steps, local=local, on_line=_say)
        if as_json:
            print(report.to_json())
        else:
            _print_lines(verify_lines(report))
        if not report.passed:
            raise typer.Exit(FAILED)


TempDir = Annotated[
    Path | None, typer.Option(help="The cluster's own directory; one cluster each. Default: one of this user's.")
]


@app.command()
def up(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="Its plan sizes the object store.")
    ] = None,
    overrides: Overrides = None,
    store_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Object store, GiB. Default: the plan's, else half of the memory.")
    ] = None,
    temp_dir: TempDir = None,
    port: Annotated[int, typer.Option(help="Of Ray's GCS, which nodes and jobs connect to.")] = 6379,
    dashboard_port: Annotated[int, typer.Option(help="Of the Dashboard, which takes jobs. On 127.0.0.1.")] = 8265,
    metrics_port: Annotated[int, typer.Option(help="Of the metrics that Prometheus reads.")] = 8080,
    client_port: Annotated[int, typer.Option(help="Of Ray Client, which this package does not use.")] = 10001,
    agent_port: Annotated[int, typer.Option(help="Of the Dashboard's agent.")] = 52365,
    print_only: Annotated[bool, typer.Option("--print", help="Show the shell line that would do it.")] = False,
    debug: Debug = False,
) -> None:
    """Start a Ray cluster of this machine that takes runs as jobs."""
    with _exit_codes(debug):
        from slideformer_ray import cluster
        from slideformer_ray.memory.host_limits import read_host_limits

        limits = read_host_limits()
        config = RunConfig.load(config_file, overrides or ()) if config_file is not None else None
        store, cpus = _sizes(config) if config is not None else (cluster.largest_store(limits), 0)
        settings = cluster.ClusterSettings(
            store_bytes=int(store_gib * GIB) if store_gib is not None else store,
            num_cpus=max(os.cpu_count() or 1, cpus),
            temp_dir=(temp_dir or cluster.default_temp_dir()).absolute(),
            port=port,
            dashboard_port=dashboard_port,
            metrics_port=metrics_port,
            client_port=client_port,
            agent_port=agent_port,
        )
        if print_only:
            _print_lines([settings.shell_line()])
            return
        started = cluster.up(settings, limits)
        submit = f"{started.submit_line} {config_file or 'CONFIG.yaml'}"
        _print_lines([*started.lines(), f"send runs      {submit}", "end it         slideformer-ray down"])


@app.command()
def down(
    stop_jobs: Annotated[bool, typer.Option("--stop-jobs", help="Stop running jobs first, which save.")] = False,
    temp_dir: TempDir = None,
    debug: Debug = False,
) -> None:
    """End the cluster that `up` started, and nothing else."""
    with _exit_codes(debug):
        from slideformer_ray import cluster

        directory = (temp_dir or cluster.default_temp_dir()).absolute()
        running = cluster.Cluster.find(directory)
        if running is None:
            raise ConfigError(f"no cluster of `slideformer-ray up` runs in {directory}")
        cluster.down(running, stop_jobs)


@app.command()
def status(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's directory. Default: every run of this user's.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    temp_dir: TempDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a run does now: losses, speed, bytes of every tier, lanes; and the cluster of `up` with its jobs."""
    with _exit_codes(debug):
        from rich.console import Console, Group
        from rich.live import Live

        from slideformer_ray import cluster
        from slideformer_ray.observe.status import last_records, running, status_table

        directory = (temp_dir or cluster.default_temp_dir()).absolute()

        def runs() -> dict[str, dict]:
            if run_dir is not None:
                return {str(run_dir): last_records(run_dir)}
            return {note["run_dir"]: last_records(Path(note["run_dir"])) for note in running()}

        def shown() -> Group:
            found = [status_table(name, records) for name, records in runs().items()]
            return Group(*found) if found else Group("no run of this user's goes on")

        here = cluster.Cluster.find(directory) if run_dir is None else None
        if as_json:
            _print_json({"cluster": cluster.status_record(here), "runs": runs()})
            return
        if here is not None:
            jobs = [f"job            {job.submission_id}, {job.status}: {job.entrypoint}" for job in here.jobs()[:5]]
            _print_lines([*here.lines(), *jobs, ""])
        console = Console()
        if not watch:
            console.print(shown())
            return
        with Live(shown(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                live.update(shown(), refresh=True)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    out: Annotated[Path, typer.Option(help="The Hugging Face directory to make.")],
    step: Annotated[int | None, typer.Option(min=1, help="Of this checkpoint. Default: the newest.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32: the exact masters; bf16: those, rounded.")] = "fp32",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a Hugging Face directory from a checkpoint's exact masters."""
    with _exit_codes(debug):
        if dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype: give fp32 or bf16 (found {dtype})")
        from slideformer_ray.export import export_model

        exported = export_model(run_dir.absolute(), out.absolute(), step, "fp32" if dtype == "fp32" else "bf16")
        if as_json:
            _print_json(dataclasses.asdict(exported))
        else:
            _print_lines([f"{exported.out_dir}: {exported.dtype} masters after {exported.steps_done} steps"])


@app.command()
def bench(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="A name (qwen2.5-3b), a config.json or a directory that holds one.")
    ],
    overrides: Overrides = None,
    rows: Annotated[str, typer.Option(help="Rows of a step; several: 8,16,32.")] = "8",
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 1024,
    micro_batch_rows: Annotated[int | None, typer.Option(min=1, help="Default: all rows of the step.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="GPU budget. Default: what is free.")] = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Optimizer actors.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each optimizer actor.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 7,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 2,
    compare: Annotated[
        str | None, typer.Option(metavar="resident", help="Measure the model that lies on the GPU whole, in this run.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="The tiers as threads of one process, without Ray.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for results.jsonl and a trace of each line.")] = None,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which no more is begun.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure steps of a model shape with random weights on random tokens: time, speed, memory, what the GPU waits for.

    Each line is measured in a process of its own. `--json` prints a line of JSON each, as it comes.
    """
    with _exit_codes(debug), tempfile.TemporaryDirectory(prefix="slideformer-ray-bench-") as scratch:
        if compare not in (None, "resident"):
            raise ConfigError(f"--compare: give resident (found {compare})")
        from slideformer_ray.bench.case import model_directory, window_cases
        from slideformer_ray.bench.result import Failure, Outcome, to_line
        from slideformer_ray.bench.run import Benchmark
        from slideformer_ray.bench.tables import tables

        name, model_dir = model_directory(shape, Path(scratch))
        given = {
            "budget.gpu_gib": gpu_gib,
            "placement.num_optimizer_actors": actors,
            "placement.threads_per_optimizer_actor": threads,
        }
        settings = [f"{key}={value}" for key, value in given.items() if value is not None]
        cases = window_cases(
            name,
            model_dir,
            _numbers("--rows", rows),
            seq_len,
            micro_batch_rows,
            [*settings, *(overrides or ())],
            out,
            warmup=warmup,
            steps=steps,
            local=local,
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

        def hear(outcome: Outcome) -> None:
            if as_json:
                print(to_line(outcome), flush=True)
            if out is not None:
                with (out / "results.jsonl").open("a") as file:
                    file.write(to_line(outcome) + "\n")

        outcomes = Benchmark(cases, compare == "resident", time_limit, debug).run(hear, _say)
        if not as_json:
            _print_table(tables(outcomes))
        if any(isinstance(outcome, Failure) and outcome.crashed for outcome in outcomes):
            raise typer.Exit(FAILED)


# ----------------------------------------------------------------------------------------------------------- the pieces


def _numbers(option: str, text: str) -> list[int]:
    """Positive integers, with commas between them. Raises ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option}: give positive integers, with commas between several (found {text})")
    return found


def _print_table(table: Group) -> None:
    """As wide as it is, where stdout is no terminal."""
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def _sizes(config: RunConfig) -> tuple[int, int]:
    """(bytes of the object store, CPUs that the actors ask for) of a run, from its plan. Raises DoesNotFit."""
    from slideformer_ray.budget import resolve
    from slideformer_ray.machine import Machine
    from slideformer_ray.model.layers import describe_model, load_hf_config

    hf_config = load_hf_config(config.model.path)
    spec = describe_model(hf_config, config.model.frozen)
    found = resolve(config, spec, hf_config.intermediate_size, Machine.read(config.placement.device))
    layout = found.layout
    return found.store_bytes, 2 + layout.num_optimizer_actors * layout.threads_per_optimizer_actor


def _train(config: RunConfig, log_every: int, debug: bool) -> Summary:
    """Check, say what will be done, do it under a progress bar."""
    if debug:
        config = config.changed(["debug.ray_output=true"])
    from rich.console import Console

    from slideformer_ray.budget import DoesNotFit
    from slideformer_ray.observe.metrics import Callback
    from slideformer_ray.observe.progress import progress_report
    from slideformer_ray.observe.report import actor_lines, byte_lines, start_lines
    from slideformer_ray.trainer import Trainer

    class ActorLines(Callback):
        def on_start(self, total_steps: int, first_step: int) -> None:
            _say(*actor_lines(trainer.actor_reports))

    with _only_results_on_stdout(debug), progress_report(Console(stderr=True), log_every) as progress:
        try:
            trainer = Trainer(config, callbacks=[ActorLines(), progress])
        except DoesNotFit as error:
            _say(*byte_lines(error.plan))
            raise
        _say(*start_lines(trainer), "starting the tiers ...")
        with _interruptible(trainer):
            return trainer.train()


@contextmanager
def _only_results_on_stdout(debug: bool) -> Iterator[None]:
    """Ray prints there what its raylet complains of; `--debug` shows it on stderr."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stderr if debug else nowhere):
        yield


def _clear_earlier_quickstart(run_dir: Path, model_dir: Path) -> None:
    """Remove what an earlier quickstart left; refuse to touch anything else. Raises ConfigError."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return
    try:
        earlier = json.loads((run_dir / "config.json").read_text())["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier = ""
    if Path(earlier).parts[-2:] != model_dir.parts[-2:]:
        raise ConfigError(
            f"--run-dir: {run_dir} holds something else than an earlier quickstart; give another directory"
        )
    shutil.rmtree(run_dir)


def _config_or_quickstart(arguments: list[str]) -> RunConfig:
    if arguments and "=" not in arguments[0]:
        return RunConfig.load(arguments[0], arguments[1:])
    from slideformer_ray.data.quickstart import quickstart_config

    return quickstart_config("runs/verify").changed(arguments)  # nothing is written there


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _print_lines(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1), flush=True)


@contextmanager
def _exit_codes(debug: bool) -> Iterator[None]:
    """One message and the right exit code for every way in which a command can end."""
    _quieten(debug)
    _stops.clear()
    _running.clear()
    # A shell's background job has Ctrl-C ignored, and stays so.
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    except KeyboardInterrupt:
        if signal.SIGTERM in _stops:
            _fail("stopped by SIGTERM", TERMINATED, debug)
        _fail("stopped by Ctrl-C", INTERRUPTED, debug)
    except ValueError as error:  # ConfigError, DataError and their like: complete sentences
        _fail(str(error), WRONG_INPUT, debug)
    except OSError as error:  # a file or a disk of the user's, such as one that is full
        _fail(f"{error.filename or 'system'}: {error.strerror or error}", FAILED, debug)
    except RuntimeError as error:
        if not _is_run_error(error):
            raise
        if not (_stops and _is_interrupted(error)):
            _fail(str(error), FAILED, debug)
        if signal.SIGTERM in _stops:
            _fail(f"stopped by SIGTERM {error}", TERMINATED, debug)
        _fail(f"stopped by Ctrl-C {error}", INTERRUPTED, debug)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# Signals that asked the command to stop, and the trainer that can end its steps and save first.
_stops: list[int] = []
_running: list[Trainer] = []


def _interrupt(number: int, frame: object) -> None:
    """The first signal lets the steps under way end and be saved; any other ends the command at once."""
    _stops.append(number)
    if len(_stops) == 1 and _running and _running[0].interrupt():
        _say("stopping after the steps that are under way; once more ends at once")
        return
    # The one exception that comes out of Ray's calls as it went in: SystemExit would lose its code there.
    raise KeyboardInterrupt


@contextmanager
def _interruptible(trainer: Trainer) -> Iterator[None]:
    """While the trainer has steps under way, a signal ends those first."""
    _running.append(trainer)
    try:
        yield
    finally:
        _running.remove(trainer)


def _is_interrupted(error: RuntimeError) -> bool:
    from slideformer_ray.trainer import Interrupted

    return isinstance(error, Interrupted)


def _is_run_error(error: RuntimeError) -> bool:
    """Errors of a run that say all there is to say. Any other is a defect of ours, whose traceback is wanted."""
    from slideformer_ray.checkpoint import SaveFailed
    from slideformer_ray.tiers import TierError
    from slideformer_ray.trainer import Interrupted, TrainingDiverged

    return isinstance(error, TierError | TrainingDiverged | SaveFailed | Interrupted)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    _say(f"slideformer-ray: {message}")
    raise typer.Exit(code)


def _quieten(debug: bool) -> None:
    """Before Ray and transformers are imported: their own words are for `--debug`; nothing is reported to anyone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_LOGGER_LEVEL", "info" if debug else "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if debug else "1")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if debug:
        logging.getLogger("slideformer_ray").setLevel(logging.DEBUG)
