"""Places where no run can be, shared memory that is too small, signals that come early."""

import subprocess

import pytest

TINY = ["experiment=resnet18", "model=mlp", "loader.num_workers=0", "trainer.max_epochs=1"]


def test_a_working_directory_that_takes_nothing_is_code_7(train):
    run = train(TINY, folder="/sys")  # nobody makes a folder there, root included
    assert run.code == 7, run.err
    assert "cannot write runs/resnet18/" in run.error
    assert "permi" in run.error or "read-only" in run.error


@pytest.mark.parametrize("more", [[], ["resume=auto"], ["dry_run=true"]], ids=str)
@pytest.mark.parametrize(
    ("place", "code", "text"),
    [
        pytest.param("/", 2, "run_dir: / is the root of the file system", id="root"),
        pytest.param("x" * 300, 7, "the name is too long", id="300-characters"),
    ],
)
def test_a_run_directory_that_can_be_none_is_one_line(train, place, code, text, more):
    run = train([*TINY, *more, f"run_dir={place}"])
    assert run.code == code, run.err
    assert text in run.error


def test_a_sweep_into_the_root_is_refused(train):
    run = train([*TINY, "-m", "optimizer.lr=0.1,0.2", "run_dir=/"])
    assert run.code == 2, run.err
    assert "root of the file system" in run.error


@pytest.mark.parametrize("size", ["64k", "1m"])
def test_shared_memory_that_is_too_small_is_code_8(train, tmp_path, size):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    large = ["loader.num_workers=2", "loader.batch_size=1024", "data.image_size=32"]
    job = [*TINY, *large, f"run_dir={tmp_path}/run"]  # batches of 1 MiB
    run = train(job, tmpfs=("/dev/shm", f"size={size}"))
    assert run.code == 8, run.err
    assert "shared memory (/dev/shm) is full" in run.error
