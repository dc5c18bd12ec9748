"""The batch script: how it looks for every profile, what SLURM and shellcheck make of it, and what cannot break out."""

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from models.errors import ConfigError
from parallel.plan.rules.cluster import KNOWN, RENAMED, seconds
from recipes.jobs import make_job, quote_option, quote_override
from tests.slurm.jobs import DEVCLUSTER, ROOT, TINY, command, field, slurm, submit, wait_for, wait_for_end
from tests.small import config, options

GOLDEN = Path(__file__).parent / "golden"
PROFILES = [name for name in options("cluster") if name != "local"]
DEEP = ["data=synthetic", "data.global_batch=1024", "run.id=golden"]
EVIL = [
    "$(touch {0}/pwned)",
    "`touch {0}/pwned`",
    "'; touch {0}/pwned; '",
    '"; touch {0}/pwned; "',
    '\\"$(touch {0}/pwned)\\\\',
    "a b  c",
    "%j %x",
    "#SBATCH --nodes=7",
    "--wrap=touch {0}/pwned",
    "${{IFS}}|&><*?~!",
    "é ü 漢",
]
BREAKING = ["a\ntouch {0}/pwned", "a\n#SBATCH --nodes=7", "a\rb", "a\tb", ""]
TEXTS = ["job_name", "account", "partition", "qos", "constraint", "reservation", "gres", "python"]


def _script(profile: str, *more: str) -> str:
    overrides = [*DEEP, f"cluster={profile}", "run.root=/scratch/runs", *more]
    made = config(*overrides, "cluster.slurm.python=/opt/quintet/bin/python", "data.cache_dir=/scratch/cache")
    return make_job(made, overrides).script


@pytest.mark.parametrize("profile", PROFILES)
def test_given_a_profile_when_rendered_then_the_script_is_the_golden_one(profile: str) -> None:
    assert _script(profile) == (GOLDEN / f"{profile}.sbatch").read_text(), "renew with: python -m tests.slurm.golden"


def test_golden_scripts_are_those_of_the_profiles() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.sbatch")) == sorted([*PROFILES, *CONTAINERS])


CONTAINERS = {
    "pyxis": ["cluster.slurm.container=pyxis", "cluster.slurm.container_image='nvcr.io#nvidia/pytorch:26.01-py3'"],
    "apptainer": ["cluster.slurm.container=apptainer", "cluster.slurm.container_image=/images/train.sif"],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_given_a_container_when_rendered_then_only_the_ranks_run_in_it(name: str) -> None:
    # S-44: none is assumed, and `scontrol` is called outside.
    script = _script("slurm_h100", *CONTAINERS[name], "cluster.slurm.exclude_bad_nodes=true")
    assert script == (GOLDEN / f"{name}.sbatch").read_text()
    assert "apptainer" not in _script("slurm_h100")
    assert "--container" not in _script("slurm_h100")


def test_shellcheck_has_no_complaint() -> None:
    subprocess.run(["shellcheck", *sorted(GOLDEN.glob("*.sbatch"))], check=True)


@pytest.mark.parametrize("profile", PROFILES)
def test_given_a_golden_script_when_slurm_is_asked_then_it_would_run(
    cluster: Path, profile: str, tmp_path: Path
) -> None:
    text = (GOLDEN / f"{profile}.sbatch").read_text()
    # The machine at hand is smaller than the one meant; what SLURM has to read stays as it is.
    for option, there in (("nodes", "2"), ("ntasks-per-node", "4"), ("cpus-per-task", "1")):
        text = re.sub(rf"^#SBATCH --{option}=.*$", f'#SBATCH --{option}="{there}"', text, flags=re.MULTILINE)
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["sbatch", "--test-only", tmp_path / "job.sbatch"], check=True, capture_output=True)


def test_given_text_that_would_break_out_when_submitted_then_it_is_inert(cluster: Path, tmp_path: Path) -> None:
    texts = [text.format(tmp_path) for text in EVIL]
    jobs = []
    for index, text in enumerate(texts):
        run = tmp_path / "runs" / f"{index} {text.replace('/', ':').replace(chr(92), '')}"
        made = config(
            *TINY,
            "cluster=slurm_dev",
            f"run.dir={quote_override(str(run))}",
            "cluster.slurm.python=/bin/true",  # what runs is not the point
            "cluster.slurm.requeue=false",
        )
        renamed = replace(made.cluster.slurm, job_name=text, options=[f"--comment={text}"], modules=[])
        environment = {"EVIL": text + "\n" + text, "GLOO_SOCKET_IFNAME": "lo"}
        made = replace(made, cluster=replace(made.cluster, slurm=renamed, environment=environment))
        job = make_job(made, [f"recipe.hardware={text}\n{text}"])
        script = tmp_path / f"{index}.sbatch"
        script.write_text(job.script)
        subprocess.run(["shellcheck", "--severity=warning", script], check=True)
        job.folder.joinpath("code").mkdir(parents=True)
        number = slurm("sbatch", "--parsable", str(script)).strip()
        jobs.append((number, text, job.folder))
    for number, text, folder in jobs:
        shown = slurm("scontrol", "show", "job", number)
        assert f" JobName={text}\n" in shown
        assert "NumNodes=2" in shown or "ReqNodeList" in shown
        wait_for_end(number, folder.parent)
        assert (folder / f"log-{number}.txt").exists(), list(folder.iterdir())
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("key", TEXTS)
@pytest.mark.parametrize("text", BREAKING)
def test_given_line_ends_in_a_text_when_submitted_then_it_is_refused_by_name(
    key: str, text: str, tmp_path: Path
) -> None:
    made = config(*TINY, "cluster=slurm_dev")
    slurm_config = replace(made.cluster.slurm, **{key: text.format(tmp_path)})
    with pytest.raises(ConfigError, match=rf"cluster\.slurm\.{key}="):
        make_job(replace(made, cluster=replace(made.cluster, slurm=slurm_config)), [])


def test_given_a_run_directory_with_a_line_end_when_submitted_then_it_is_refused() -> None:
    made = config(*TINY, "cluster=slurm_dev")
    with pytest.raises(ConfigError, match=r"run\.dir="):
        make_job(replace(made, run=replace(made.run, dir="/tmp/a\n#SBATCH --nodes=7")), [])


def test_options_are_quoted_as_sbatch_reads_them() -> None:
    assert quote_option("comment", 'a "b" \\c') == '--comment="a \\"b\\" \\\\c"'
    assert quote_option("exclusive", None) == "--exclusive"


def test_given_a_secret_in_a_field_when_submitted_then_it_is_refused_and_not_shown(tmp_path: Path) -> None:
    done = command(
        "submit",
        "cluster=slurm_dev",
        *TINY,
        "+cluster.environment.WANDB_API_KEY=0123456789abcdef",
        f"run.root={tmp_path}",
    )
    assert done.returncode == 2
    assert "cluster.environment.WANDB_API_KEY holds what looks like a secret" in done.stderr
    assert "0123456789abcdef" not in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []


def test_given_show_when_submitted_then_the_script_is_printed_and_nothing_is_written(tmp_path: Path) -> None:
    done = command("submit", "submit.show=true", "cluster=slurm_dev", *TINY, f"run.root={tmp_path}", "run.id=x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "submit.show" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_given_a_bad_config_when_submitted_then_it_is_refused_as_train_does(tmp_path: Path) -> None:
    done = command(
        *("submit", "cluster=slurm_h100", "parallelism.tp=3", "cluster.slurm.time=soon", f"run.root={tmp_path}"),
        *("+cluster.environment.NCCL_ASYNC_ERROR_HANDLING=1", "+cluster.environment.NCCL_SHARP_DISABLE=1"),
        "+cluster.environment.NCCL_SOCKET_IFNAMES=eth0",
    )
    assert done.returncode == 2
    for words in (
        "parallelism: ",
        "cluster.slurm.time=soon",
        "Write TORCH_NCCL_ASYNC_ERROR_HANDLING instead",
        "Write NCCL_COLLNET_ENABLE=0 instead",
        "Did you mean NCCL_SOCKET_IFNAME?",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_given_a_config_without_devices_when_submitted_then_it_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.devices_per_node=null"):
        make_job(config(*TINY), [])


def test_no_profile_uses_a_name_that_nothing_reads() -> None:
    assert not KNOWN & RENAMED.keys()
    for profile in PROFILES:
        for name in config(*DEEP, f"cluster={profile}").cluster.environment:
            assert name in KNOWN or name.startswith(("FI_", "GLOO_")), f"{profile}: {name}"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_variable_of_a_profile_says_why(profile: str) -> None:
    lines = (ROOT / "conf" / "cluster" / f"{profile}.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r"  [A-Z_]+: ", line):
            assert before.startswith("  # "), line


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("30", 1800), ("30:10", 1810), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-2:30:05", 95405)],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, expected: int) -> None:
    assert seconds(limit) == expected


def test_given_a_queued_job_when_the_code_is_edited_then_the_job_runs_what_was_submitted(
    cluster: Path, tmp_path: Path
) -> None:
    number = submit(*TINY, f"run.root={tmp_path}", "run.id=a", "cluster.slurm.options=[--hold]", "trainer.max_steps=2")
    code = tmp_path / "tiny/a/job-1/code"
    for name in ("recipes/train.py", "conf/config.yaml", "slurm/train.sbatch.j2"):
        assert (code / name).read_text() == (ROOT / name).read_text()
    assert not list(code.rglob("__pycache__"))
    assert set(json.loads((code / "snapshot.json").read_text())) == {"commit", "dirty"}
    assert 'cd "$job_dir/code"' in (tmp_path / "tiny/a/job-1/train.sbatch").read_text()
    assert field(number, "JobState") == "PENDING"
    again = command("submit", "cluster=slurm_dev", *TINY, f"run.root={tmp_path}", "run.id=a", "trainer.max_steps=2")
    assert again.returncode == 2
    assert f"has job {number} in the queue" in again.stderr
    slurm("scancel", number)
    wait_for(lambda: field(number, "JobState") == "CANCELLED", "cancelled")


def test_the_development_cluster_says_what_it_is(cluster: Path) -> None:
    shown = subprocess.run(
        [DEVCLUSTER, f"--dir={cluster}", "status"], capture_output=True, text=True, check=True
    ).stdout
    assert "node1" in shown
    assert "node2" in shown
    assert "gpu:8" in slurm("scontrol", "show", "node", "node1")
