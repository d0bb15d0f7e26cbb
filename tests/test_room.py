"""A run whose memory is not there is refused on a CPU before it starts, in one line that helps."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kill_and_resume import environment

from pipelines.decode import check_room_to_ask
from pipelines.run import check_room, saying_what_would_fit
from xtrain.assemble.estimate import asking_memory_bytes, run_memory_bytes
from xtrain.command.ending import guarded
from xtrain.config.compose import compose, load_run
from xtrain.errors import OutOfDeviceMemory, UsageError
from xtrain.track.room import Room, room

GB = 10**9
MEMINFO = "MemTotal: 32000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n"
STATUS = "Name:\tpython\nVmSize:\t 3000000 kB\nVmRSS:\t  100000 kB\n"
HELD, FREE = 100_000 * 1024, 20_000_000 * 1024


def machine(root: Path, **files: str) -> Path:
    """A tree of /proc and /sys; `files` by name, with __ for a slash."""
    named = {"proc/meminfo": MEMINFO, "proc/self/status": STATUS}
    for name, text in {**named, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: int | str, used: int, dropped: int) -> dict[str, str]:
    top = "sys/fs/cgroup"
    return {
        f"{top}/{folder}memory.max": f"{limit}\n",
        f"{top}/{folder}memory.current": f"{used}\n",
        f"{top}/{folder}memory.stat": f"anon 5\ninactive_file {dropped}\n",
    }


def test_without_a_limit_it_is_what_the_machine_has(tmp_path):
    assert room(machine(tmp_path)) == Room(HELD + FREE, "this machine's memory")
    assert room(tmp_path / "none") is None


def test_a_control_group_s_limit_counts_less_what_it_uses_and_cannot_drop(tmp_path):
    files = group("job/", 8 * GB, 3 * GB, GB) | {"proc/self/cgroup": "0::/job\n"}
    found = room(machine(tmp_path, **files))
    assert found == Room(HELD + 6 * GB, "the limit in /sys/fs/cgroup/job/memory.max")


def test_a_group_above_may_be_the_tighter_one_and_max_is_no_limit(tmp_path):
    files = group("", 2 * GB, GB, 0) | group("job/", "max", GB, 0)
    found = room(machine(tmp_path, **files, **{"proc/self/cgroup": "0::/job\n"}))
    assert found == Room(HELD + GB, "the limit in /sys/fs/cgroup/memory.max")


def test_in_a_container_the_path_of_the_host_is_not_there(tmp_path):
    files = group("", 4 * GB, GB, 0) | {"proc/self/cgroup": "0::/kubepods/pod7/abc\n"}
    assert room(machine(tmp_path, **files)).bytes == HELD + 3 * GB


@pytest.mark.parametrize(("limit", "left"), [(5 * GB, 4 * GB), (2**63 - 4096, FREE)])
def test_groups_of_version_1_are_read_too(tmp_path, limit, left):
    top = "sys/fs/cgroup/memory/job/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
        f"{top}.limit_in_bytes": f"{limit}\n",
        f"{top}.usage_in_bytes": f"{2 * GB}\n",
        f"{top}.stat": f"total_inactive_file {GB}\n",
    }
    assert room(machine(tmp_path, **files)).bytes == HELD + left


@pytest.fixture(scope="module")
def v0():
    return load_run(compose(["run=v0", "device=cpu"]))


def test_a_run_that_just_fits_starts_and_one_byte_less_is_refused(v0):
    needed = run_memory_bytes(v0, "cpu").largest
    check_room(v0, Room(needed, "this machine's memory"))
    with pytest.raises(UsageError) as refused:
        check_room(v0, Room(needed - 1, "this machine's memory"))
    said = str(refused.value)
    assert said.startswith("run=v0 needs ") and "this machine's memory leaves" in said
    assert "; what would fit: train.batch_size=" in said


def test_an_array_that_found_no_memory_is_one_line(v0, capsys):
    told = "^memory is full: Unable to allocate 9 GiB; "
    with pytest.raises(OutOfDeviceMemory, match=told), saying_what_would_fit(v0):
        raise MemoryError("Unable to allocate 9 GiB")

    def full():
        raise MemoryError("Unable to allocate 9 GiB")

    assert guarded("xtrain", full) == 1
    assert capsys.readouterr().err == "xtrain: memory is full: Unable to allocate 9 GiB\n"


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")


def refusal(directory, gigabytes, *keys, kind=resource.RLIMIT_AS):
    """The last line of a command that may hold so much and is refused with exit code 2."""
    (directory / "text.txt").write_text("The people sent letters.\n" * 400)
    limit = gigabytes * GB
    result = subprocess.run(
        [sys.executable, "-m", "pipelines", *keys, "data=text", "data.path=text.txt", "device=cpu"],
        cwd=directory,
        env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result.stderr.splitlines()[-1]


@needs_proc
def test_the_command_refuses_a_run_beyond_the_limit_of_its_shell_and_writes_nothing(tmp_path):
    keys = ["run=v9", "features.precision=fp32", "features.remat=none"]
    last = refusal(tmp_path, 5, *keys)
    assert last.startswith("xtrain: run=v9 needs ") and "the limit of ulimit -v leaves" in last
    assert "are needed even with train.batch_size=1" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@needs_proc
def test_a_sequence_of_20000_tokens_that_does_not_fit_is_one_line(tmp_path):
    keys = ["train.seq_len=20000", "model.max_position_embeddings=20000", "optim.warmup_steps=0"]
    last = refusal(tmp_path, 5, "run=v0", *keys)
    assert last.startswith("xtrain: run=v0 needs ") and "the limit of ulimit -v leaves" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@needs_proc
def test_a_place_where_nothing_can_be_made_is_one_line(tmp_path):
    last = refusal(tmp_path, 5, "run=v0", "out=/proc/x")
    assert last == "xtrain: /proc/x/data: cannot write the data cache: No such file or directory"


@pytest.mark.parametrize(("phase", "says"), [("decode", "decoding"), ("eval", "evaluation")])
def test_a_trained_model_that_just_fits_is_asked_and_one_byte_less_is_refused(phase, says):
    run = load_run(compose(["run=v0", "device=cpu", f"phase={phase}"]))
    needed = asking_memory_bytes(run, "cpu").largest
    assert needed < run_memory_bytes(run, "cpu").largest
    check_room_to_ask(run, Room(needed, "this machine's memory"))
    check_room_to_ask(replace(run, device="cuda"), None)
    with pytest.raises(UsageError, match=f"^run=v0 needs .* GB for {says}, this machine's memory"):
        check_room_to_ask(run, Room(needed - 1, "this machine's memory"))


@needs_proc
@pytest.mark.parametrize("keys", [["phase=decode", "prompt=Once"], ["phase=eval", "eval=sotu_v1"]])
def test_the_command_refuses_to_ask_a_model_beyond_the_limit_of_its_shell(tmp_path, keys):
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 50257,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    count = 1_512_336_384  # weights of that shape, in a file with a hole instead of them
    one = {"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    header = json.dumps(one).encode()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 4 * count)
    # Not `ulimit -v`: the file is mapped to read its header, which counts there.
    keys = ["run=v0", *keys, "init_from=model"]
    last = refusal(tmp_path, 5, *keys, kind=resource.RLIMIT_DATA)
    assert last.startswith("xtrain: run=v0 needs ") and "the limit of ulimit -d leaves" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_a_gpu_s_run_is_not_held_against_the_host_s_memory(v0):
    check_room(replace(v0, device="cuda"), None)
