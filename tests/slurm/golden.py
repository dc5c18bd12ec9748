"""Write the golden scripts anew: `python -m tests.slurm.golden`. Look at the difference before it is committed."""

from tests.slurm.test_submit import CONTAINERS, GOLDEN, PROFILES, _script

if __name__ == "__main__":
    for old in GOLDEN.glob("*.sbatch"):
        old.unlink()
    for profile in PROFILES:
        (GOLDEN / f"{profile}.sbatch").write_text(_script(profile))
    for name, more in CONTAINERS.items():
        (GOLDEN / f"{name}.sbatch").write_text(_script("slurm_h100", *more, "cluster.slurm.exclude_bad_nodes=true"))
