"""The manifests for Kubernetes: they are well formed, and ranks with their environment meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll
from gpucoll.rendezvous.job import find_job
from gpucoll.rendezvous.meeting_points import TcpPoint

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
WAIT_S = 120.0
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROGRAM = """\
import gpucoll
with gpucoll.init(timeout_s=60) as comm:
    total, hosts = comm.all_reduce(comm.rank), dict(comm.describe().facts)["hosts"]
    print(comm.rank, comm.world_size, total, hosts)
"""


def documents(name):
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def job_of(name):
    """Return the Job's specification, and what its pod 0 is called in the DNS."""
    if name == "jobset":
        (jobset,) = documents(name)
        (part,) = jobset["spec"]["replicatedJobs"]
        called = jobset["metadata"]["name"]
        assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        return part["template"]["spec"], f"{called}-{part['name']}-0-0.{called}"
    service, job = documents(name)
    called = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": called}
    assert service["spec"]["clusterIP"] == "None"
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    return job["spec"], f"{called}-0.{subdomain}"


def environment(job, index):
    """Return what the container of a pod finds, as Kubernetes makes it of the manifest."""
    found = {"JOB_COMPLETION_INDEX": str(index)}  # what an Indexed Job sets by itself
    for entry in job["template"]["spec"]["containers"][0]["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == INDEX
            found[entry["name"]] = str(index)
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "train-secret", "key": "secret"}
            found[entry["name"]] = "0123456789abcdef" * 4
        else:
            assert isinstance(entry["value"], str), "Kubernetes takes strings alone"
            found[entry["name"]] = entry["value"]
    return found


@pytest.mark.parametrize("name", ["jobset", "job"])
def test_what_init_makes_of_a_pods_environment(name, monkeypatch):
    job, first = job_of(name)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == 4
    for key, value in environment(job, 2).items():
        monkeypatch.setenv(key, value)
    found = find_job()

    assert (found.rank, found.world_size) == (2, 4)
    assert found.is_launched
    assert isinstance(found.meet, TcpPoint)
    assert (found.meet.host, found.meet.port) == (first, 29500)


@pytest.mark.parametrize("name", ["jobset", "job"])
def test_pods_meet(name, rank_server):
    job, first = job_of(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = []
    try:
        for index in range(4):
            variables = environment(job, index)
            meet = variables["GPUCOLL_MEET"].replace(f"{first}:29500", f"127.0.0.1:{port}")
            played = {"GPUCOLL_HOST_ID": f"pod {index}", "GPUCOLL_INTERFACES": "lo"}
            path = str(Path(gpucoll.__file__).parent.parent)
            pods.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM],
                    env={
                        **os.environ,
                        **variables,
                        **played,
                        "GPUCOLL_MEET": meet,
                        "PYTHONPATH": path,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [pod.communicate(timeout=WAIT_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()

    for index, text in enumerate(said):
        assert text.startswith(f"{index} 4 6 "), text
        assert "rank 3" in text
