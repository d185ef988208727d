"""Run a real Slurm cluster of several nodes on this machine, in one temporary directory.

It needs no file in /etc and no system service, and leaves nothing behind. Each node is a slurmd in
its own PID, mount and UTS namespaces. Therefore `hostname` is the node's, the nodes find each other
by name, the processes of a node can be listed, and killing a node kills all that runs on it, as a
power cut does. The GPUs are clones of /dev/null that Slurm counts and assigns. Linux only, as root.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "squeue",
    "scontrol",
    "scancel",
    "unshare",
    "setpriv",
)
PACKAGES = "slurmctld slurmd slurm-client munge"
PREFIX = os.environ.get("SLURM_PREFIX")
"""The folder of another Slurm than the system's (tests/slurm/build_slurm.sh), if it is to be
tested. Its programs come first in PATH."""
START_SECONDS = 180
STATE_SAVE_SECONDS = 6
"""SAVE_MAX_WAIT (5 s) in Slurm's src/slurmctld/state_save.c, and a second for the writing."""
CONTROLLER = "controller"
# Linux takes the ports of outgoing connections from 32768 up. A lower one is still free when a
# killed daemon is started again.
PORTS = range(20_000, 32_000, 40)
"""The first ports of the blocks from which each cluster has one for itself."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
"""States in which a job stays."""
# Bash stays as process 1 to reap orphans, as an init does, so the command is not `exec`ed. A bind
# mount also works in a container, where /etc/hosts is itself a mount and cannot be replaced.
IN_NAMESPACE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && "$@"; exit $?'


def missing() -> str | None:
    """Return why no cluster can be started here, or None if one can."""
    if os.geteuid() != 0:
        return "a cluster in namespaces needs root"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=_search_path())]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install {PACKAGES})"
    probe = subprocess.run(
        ["unshare", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return f"unshare: {probe.stderr.strip()}" if probe.returncode else None


class Cluster:
    """A cluster of nodes n1, n2, ... in the partition "main"."""

    def __init__(self, num_nodes: int = 16, gpus: int = 8, cpus: int = 16) -> None:
        """Make the cluster's directory; `start` starts it.

        Args:
            num_nodes: Number of nodes.
            gpus: Fake GPUs per node.
            cpus: Processors per node, as Slurm counts them.
        """
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.gpus, self.cpus = gpus, cpus
        # Directly in /tmp, because the path of a UNIX socket has at most 108 bytes. Accessible to
        # all users, because munged refuses a socket that others cannot reach.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self.without_pyxis: str | None = "the cluster has not been started"
        """The reason why this cluster has no pyxis, or None if it has."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._holds_ports, self._ports = _free_ports(num_nodes + 1)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a command finds this cluster."""
        return {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": _search_path()}

    # ---- the whole cluster ----
    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        self._write()
        self._spawn(
            "munged",
            [
                "munged",
                "--foreground",
                f"--socket={self.root}/munge/socket",
                f"--key-file={self.root}/munge/key",
                f"--log-file={self.root}/log/munged.log",
                f"--pid-file={self.root}/munge/pid",
                f"--seed-file={self.root}/munge/seed",
            ],
        )
        self._wait(
            lambda: (self.root / "munge/socket").exists(), "munged does not answer", "munged"
        )
        self.start_controller()
        for node in self.nodes:
            self._spawn_node(node)
        self._wait_for_nodes()

    def stop(self) -> None:
        """Kill every process of the cluster, including its jobs, and remove its files."""
        for name in [*self.nodes, CONTROLLER, "munged"]:
            self.kill(name)
        self._holds_ports.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # ---- its parts ----
    def kill(self, name: str) -> None:
        """Kill a daemon with all processes of its namespace, as a power cut does.

        Slurm is not told. Does nothing if there is no such daemon.
        """
        if name not in self._daemons:
            return
        # When process 1 of a PID namespace is killed, the kernel kills all others in it.
        with contextlib.suppress(OSError):
            os.kill(self._init(name), signal.SIGKILL)
        self._daemons.pop(name).wait()

    def start_node(self, node: str) -> None:
        """Boot a node and wait until Slurm may use it again."""
        self._spawn_node(node)
        self._wait(
            lambda: self.node_states().get(node) in ("idle", "mix", "alloc"),
            f"{node} is not up",
            node,
        )

    def restore(self) -> None:
        """Start the daemons that a test has killed, and wait until Slurm may use every node."""
        if CONTROLLER not in self._daemons:
            self.start_controller()
        for node in self.nodes:
            if node not in self._daemons:
                self.start_node(node)
        self._wait_for_nodes()

    def kill_controller(self) -> None:
        """Kill slurmctld (SIGKILL), after the seconds in which it saves its current state to disk.

        Without the wait, a job's start might not be saved. The next slurmctld would then start the
        job a second time, and drain the node on which it already runs. A change that is made now is
        saved with all that came before, so the wait is over when the file has been written.
        """
        saved = self.root / "state/job_state"
        before = saved.stat().st_ino if saved.exists() else 0
        jobs = self.run("squeue", "--noheader", "--states=running", "--format=%A").stdout.split()
        for job in jobs[:1]:
            self.run("scontrol", "update", f"JobId={job}", "Comment=saved")
        deadline = time.monotonic() + STATE_SAVE_SECONDS
        while jobs and time.monotonic() < deadline:
            if saved.exists() and saved.stat().st_ino != before:
                break
            time.sleep(0.05)
        self.kill(CONTROLLER)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state and wait until it answers."""
        self._spawn_in_namespace(
            CONTROLLER, ["slurmctld", "-D", "-f", str(self.root / "slurm.conf")]
        )
        self._wait(
            lambda: "is UP" in self.run("scontrol", "ping").stdout,
            "slurmctld does not answer",
            CONTROLLER,
        )

    def node_states(self) -> dict[str, str]:
        """Return each node's state as sinfo prints it: "idle", "mix", "alloc", "down", "down*", ...

        The result is empty while no controller answers.
        """
        lines = self.run("sinfo", "--Node", "--noheader", "--format=%N %t").stdout.splitlines()
        return {node: state for node, state in map(str.split, lines)}

    def processes(self, *nodes: str) -> dict[int, tuple[str, str]]:
        """Return the processes on nodes, on all by default, other than slurmd.

        /proc is read once, because tests ask again and again.

        Returns:
            Process id on this machine -> (node, command line); nothing of a dead node.
        """
        spaces, found = {}, {}
        for node in nodes or self.nodes:
            with contextlib.suppress(KeyError, OSError):
                spaces[os.readlink(f"/proc/{self._init(node)}/ns/pid")] = node
        for path in Path("/proc").glob("[0-9]*"):
            # OSError: the process has ended meanwhile.
            with contextlib.suppress(OSError):
                space = os.readlink(path / "ns/pid")
                if space in spaces:
                    words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    # A zombie has an empty command line.
                    if words[0] not in ("", "bash", "slurmd"):
                        found[int(path.name)] = (spaces[space], " ".join(words).strip())
        return found

    # ---- commands and jobs ----
    def run(
        self, *command: object, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the cluster's login node, which is this machine, and wait for it."""
        variables = os.environ | self.environment | dict(environment or {})
        return subprocess.run(
            [str(word) for word in command],
            env=variables,
            text=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            **options,
        )

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, Restarts, NodeList, BatchHost, ...

        The result is empty when Slurm does not know the job.
        """
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(self, job_id: str, states: Iterable[str] = ("COMPLETED",)) -> dict[str, str]:
        """Wait until a job is in one of `states` and return its fields.

        The test fails when the job ends in another state, or after TIMEOUT_SECONDS.
        """
        wanted = set(states)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (fields := self.job(job_id)).get("JobState") not in wanted:
            assert fields.get("JobState") not in OVER, (
                f"job {job_id}: {fields}, waited for {wanted}"
            )
            assert time.monotonic() < deadline, (
                f"job {job_id}: {fields} after {TIMEOUT_SECONDS} s, waited for {wanted}"
            )
            time.sleep(0.2)
        return fields

    def step_processes(self, job_id: str, *words: str) -> dict[int, tuple[str, str]]:
        """Return the processes of a job: process id on this machine -> (node, command line).

        Args:
            job_id: The job.
            words: Return only processes whose command lines contain all of these.
        """
        found = {}
        for pid, (node, command) in self.processes().items():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"SLURM_JOB_ID={job_id}".encode() in variables and all(
                    word in command for word in words
                ):
                    found[pid] = (node, command)
        return found

    def report(self, lines: int = 40) -> str:
        """Return what may explain a failed test: queue, nodes, and the ends of daemons' logs."""
        parts = [self.run("squeue", "--states=all").stdout, self.run("sinfo").stdout]
        for log in sorted((self.root / "log").glob("*.log")):
            said = log.read_text(errors="replace").rpartition(" started on ")[2].splitlines()[2:]
            parts.append("\n".join([f"--- {log.name}", *said[-lines:]]) if said else "")
        return "\n".join(filter(None, parts))

    # ---- internals ----
    def _write(self) -> None:
        """Write the cluster's configuration, key, hosts file and device files."""
        for name in ("munge", "state", "log", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True)
        key = os.open(self.root / "munge/key", os.O_CREAT | os.O_WRONLY, 0o600)
        with open(key, "wb") as file:
            file.write(secrets.token_bytes(128))
        for gpu in range(self.gpus):
            os.mknod(self.root / f"dev/nvidia{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        names = "".join(f"127.0.0.1 {name}\n" for name in [CONTROLLER, *self.nodes])
        (self.root / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.root / "slurm.conf").write_text(slurm_conf(self, self._ports))
        # Slurm puts the numbers of the fake GPUs in CUDA_VISIBLE_DEVICES.
        gpus = f"Name=gpu File={self.root}/dev/nvidia[0-{self.gpus - 1}] Flags=nvidia_gpu_env"
        (self.root / "gres.conf").write_text(f"AutoDetect=off\n{gpus}\n" if self.gpus else "")
        # Without it slurmd uses the machine's. The cluster has no cgroups.
        (self.root / "cgroup.conf").write_text("ConstrainCores=no\n")
        self.without_pyxis = build_pyxis(self.root, Path(PREFIX, "include") if PREFIX else None)

    def _spawn_node(self, node: str) -> None:
        self._spawn_in_namespace(
            node, ["slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf")]
        )

    def _wait_for_nodes(self) -> None:
        """Wait until Slurm may use every node, after asking for those that a test has drained."""
        up = {"idle", "mix", "alloc", "comp", "plnd"}
        drained = [node for node, state in self.node_states().items() if state.startswith("dr")]
        if drained:
            self.run("scontrol", "update", f"nodename={','.join(drained)}", "state=resume")
        # A slurmctld that has just started does not know the nodes for some seconds. Until then
        # `sbatch --test-only` refuses every job.
        self._wait(
            lambda: bool(states := set(self.node_states().values())) and states <= up,
            "the nodes are not up",
            *self.nodes,
        )

    def _spawn_in_namespace(self, hostname: str, command: Sequence[str]) -> None:
        """Start a daemon with its own hostname, /etc/hosts and process ids."""
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._spawn(
            hostname,
            [
                *unshare,
                "bash",
                "-c",
                IN_NAMESPACE,
                "bash",
                hostname,
                str(self.root / "hosts"),
                *command,
            ],
        )

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        """Start a daemon, whose output goes to log/NAME.out."""
        assert name not in self._daemons, f"{name} runs already"
        with open(self.root / f"log/{name}.out", "ab") as output:
            # The kernel kills the daemon when the tests' process ends, however that happens.
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=os.environ | self.environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _init(self, name: str) -> int:
        """Return process 1 of a daemon's namespace, or the daemon itself if it has none."""
        pid = self._daemons[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def _wait(self, condition: Callable[[], bool], complaint: str, *daemons: str) -> None:
        """Wait for a condition; fail when one of `daemons` ends, or after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            dead = [name for name in daemons if self._daemons[name].poll() is not None]
            assert not dead, f"{dead} ended\n{self.report()}"
            assert time.monotonic() < deadline, f"{complaint}\n{self.report()}"
            time.sleep(0.05)


def _search_path() -> str:
    """Return PATH with the sbin folders, where Debian has Slurm's daemons."""
    chosen = f"{PREFIX}/bin:{PREFIX}/sbin:" if PREFIX else ""
    return f"{chosen}{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def _free_ports(count: int) -> tuple[socket.socket, list[int]]:
    """Return consecutive ports, all free, and what keeps them this cluster's until it is closed.

    That the ports are free is not enough: another cluster that starts now has not bound its own
    yet. Therefore it holds their block by an abstract name, which the kernel gives to one process
    and takes back when that ends.
    """
    assert count <= PORTS.step
    for first in random.sample(PORTS, len(PORTS)):
        held = socket.socket(socket.AF_UNIX)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            held.bind(f"\0tests/slurm, ports from {first}")
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return held, list(range(first, first + count))
        held.close()
    raise AssertionError(f"no {count} free ports in {PORTS}")


# ---- its configuration ---------------------------------------------------------------------------
NODE_TIMEOUT_SECONDS = 5
MUNGE_SECONDS = 5
"""The time for which a credential is valid, 5 s at least.

slurmctld starts a requeued job only after the credentials of its last start have expired.
"""
GRACE_SECONDS = 60
"""The time that a preempted job of "low" and "low_cancel" has to end by itself."""
PARTITIONS = {
    "main": "Default=YES PriorityTier=5 PreemptMode=OFF",
    "low": f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_SECONDS}",
    "low_nograce": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
    "low_cancel": f"PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_SECONDS}",
    "low_cancel_nograce": "PriorityTier=1 PreemptMode=CANCEL GraceTime=0",
    "high": "PriorityTier=10 PreemptMode=OFF",
}
"""Each has all nodes. A job of "high" preempts those of the "low" ones, which differ in what
becomes of a preempted job. Jobs of "main" are never preempted; "main" and "high" preempt "low"."""


def slurm_conf(cluster: Cluster, ports: Sequence[int]) -> str:
    """Return the slurm.conf of a cluster whose daemons all listen on 127.0.0.1.

    Args:
        cluster: The cluster. All of its nodes are in each of PARTITIONS.
        ports: The port of slurmctld, then that of each node's slurmd.
    """
    root, (controller_port, *node_ports) = cluster.root, ports
    resources = f"CPUs={cluster.cpus} RealMemory=64000 Gres=gpu:{cluster.gpus}"
    lines = [
        f"NodeName={node} NodeAddr=127.0.0.1 Port={port} {resources} State=UNKNOWN"
        for node, port in zip(cluster.nodes, node_ports, strict=True)
    ]
    partitions = [
        f"PartitionName={name} Nodes=ALL {settings} MaxTime=INFINITE State=UP"
        for name, settings in PARTITIONS.items()
    ]
    return f"""\
ClusterName=tests
SlurmctldHost={CONTROLLER}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire={MUNGE_SECONDS}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
# Nodes have the resources written here, whatever slurmd finds on this machine.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Notice a new job, a dead node and one that is back at once.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdTimeout={NODE_TIMEOUT_SECONDS}
MessageTimeout=5
KillWait=3
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{chr(10).join(lines)}
{chr(10).join(partitions)}
"""


# ---- pyxis ---------------------------------------------------------------------------------------
PYXIS = Path(__file__).with_name("pyxis.c")
PYXIS_PACKAGES = "g++ libslurm-dev"
IMAGE = "nvcr.io#nvidia/pytorch:24.01-py3"
"""An image in which pyxis sets torchrun's variables, as in all PyTorch images of NVIDIA."""


def build_pyxis(folder: Path, include: Path | None) -> str | None:
    """Compile the tests' own pyxis.c and write the plugstack.conf that loads it.

    Args:
        folder: Where slurm.conf is; gets pyxis.so and plugstack.conf.
        include: Where Slurm's headers are, if the compiler does not look there by itself.

    Returns:
        Why it cannot be compiled here, or None.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return f"no C compiler (Debian: apt-get install {PYXIS_PACKAGES})"
    options = [f"-I{include}"] if include else []
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", *options, "-o", folder / "pyxis.so", PYXIS],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"{done.stderr.splitlines()[0]} (Debian: apt-get install {PYXIS_PACKAGES})"
    (folder / "plugstack.conf").write_text(f"required {folder}/pyxis.so\n")
    return None


def pyxis_options(*folders: Path, image: str = IMAGE) -> list[str]:
    """Return srun's options for a container that sees this project, its Python and `folders`.

    The first of `folders` is the working directory.
    """
    seen = dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix, *folders)))
    mounts = ",".join(f"{path}:{path}" for path in seen)
    return [
        f"--container-image={image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={folders[0] if folders else ROOT}",
    ]
