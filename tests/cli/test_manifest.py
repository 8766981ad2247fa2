"""`kvcache check --manifest`: each mistake planted in the example's manifest is found."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("yaml")

import yaml

from kvcache.cli.manifest import check_manifest

CONTAINERS = Path(__file__).parents[2] / "examples" / "containers"
EXAMPLE = (CONTAINERS / "kubernetes.yaml").read_text()


def faults(tmp_path, *replacement):
    """Return the findings in the example after a replacement: level, the subject's last part and the text."""
    path = tmp_path / "kubernetes.yaml"
    path.write_text(EXAMPLE)
    for old, new in replacement:
        assert EXAMPLE.count(old) == 1, old
        path.write_text(EXAMPLE.replace(old, new))
    found = check_manifest(path)
    return [(one.level, one.subject.split(": ")[-1], one.text) for one in found if one.level != "ok"]


def test_check_example_finds_no_fault(tmp_path):
    assert faults(tmp_path) == []
    assert len(check_manifest(CONTAINERS / "kubernetes.yaml")) == 5


CLAIM = "persistentVolumeClaim:\n            claimName: kvcache-disk"
COMMAND = "command: [vllm, serve, Qwen/Qwen3-8B, --kv-transfer-config, $(KV_TRANSFER_CONFIG)]"
LIMIT = "# The pool, and what the engine itself takes.\n              memory: 96Gi"
VLLM = "Deployment/vllm, vllm"


@pytest.mark.parametrize(
    ("old", "new", "level", "subject", "text"),
    [
        ("sizeLimit: 72Gi", "sizeLimit: 8Gi", "error", "shared memory", "the volume's sizeLimit is 8Gi"),
        ("mountPath: /dev/shm", "mountPath: /shm", "error", "shared memory", "no volume is mounted"),
        ("medium: Memory", 'medium: ""', "error", "shared memory", "medium Memory"),
        (LIMIT, "memory: 60G", "error", "memory", "the limit 60G is not above the pool's 64 GiB"),
        (LIMIT, "cpu: 8", "warning", "memory", "no memory limit"),
        ("add: [IPC_LOCK]", "drop: [ALL]", "warning", "pinned memory", "without the capability IPC_LOCK"),
        (CLAIM, "emptyDir: {}", "warning", "tier DiskTier", "an emptyDir is deleted with the pod"),
        (CLAIM, "", "warning", "tier DiskTier", "an emptyDir is deleted with the pod"),
        (CLAIM, "emptyDir: {medium: Memory}", "error", "tier DiskTier", "an emptyDir in memory"),
        ("mountPath: /var/lib/kvcache", "mountPath: /var/lib/kv", "error", "tier DiskTier", "no volume"),
        ("storage: 500Gi", "storage: 0.4e3Gi", "error", "tier DiskTier", "kvcache-disk requests 400 GiB only"),
        ("replicas: 1", "replicas: 2", "error", "volumes", "(every replica), the next one open it"),
        ("type: Recreate", "type: RollingUpdate", "error", "volumes", "its successor (strategy Recreate"),
        ('"type": "disk", ', '"type": "dsik", ', "error", VLLM, "'dsik'"),
        ('"cpu_bytes_to_use": "64GiB"', '"cpu_bytes": 3', "error", VLLM, "'cpu_bytes_to_use'"),
        ('"cpu_bytes_to_use"', '"pool": 1, "cpu_bytes_to_use"', "warning", VLLM, "unknown keys"),
        ('"kv_role": "kv_both",', '"kv_role": "kv_both"', "error", VLLM, "is not JSON"),
        ('"spec_module_path": "kvcache.', '"spec_module_path": "vllm.', "error", VLLM, "vLLM would not use kvcache"),
        ("key: kv-transfer-config", "key: config", "error", VLLM, "'$(KV_TRANSFER_CONFIG)', which no"),
    ],
)
def test_planted_mistake_is_the_only_finding(tmp_path, old, new, level, subject, text):
    ((found_level, found_subject, found_text),) = faults(tmp_path, (old, new))
    assert (found_level, found_subject) == (level, subject)
    assert text in found_text


def test_two_pods_on_one_volume_fail(tmp_path):
    documents = list(yaml.safe_load_all(EXAMPLE))
    other = json.loads(json.dumps(documents[2]))
    other["metadata"]["name"] = "other"
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump_all([*documents, other]))
    (finding,) = [one for one in check_manifest(path) if one.level != "ok"]
    assert finding.text == (
        "persistentVolumeClaim kvcache-disk, directory blocks, belongs to one engine, "
        "and Deployment/vllm, Deployment/other open it"
    )
    # Each one in its own directory of the volume.
    other["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][1]["subPath"] = "other"
    path.write_text(yaml.safe_dump_all([*documents, other]))
    assert {one.level for one in check_manifest(path)} == {"ok"}


def test_stateful_set_with_claims_passes_check(tmp_path):
    documents = list(yaml.safe_load_all(EXAMPLE))
    workload = documents[2]
    workload["kind"] = "StatefulSet"
    workload["spec"]["replicas"] = 4
    workload["spec"]["template"]["spec"]["volumes"].pop(1)
    claim = {"metadata": {"name": "disk"}, "spec": {"resources": {"requests": {"storage": "480Gi"}}}}
    workload["spec"]["volumeClaimTemplates"] = [claim]
    path = tmp_path / "set.yaml"
    path.write_text(yaml.safe_dump_all([{"kind": "List", "items": documents}]))
    assert {one.level for one in check_manifest(path)} == {"ok"}


@pytest.mark.parametrize(
    "command",
    [
        "command: [sh, -c, 'exec vllm serve m --kv-transfer-config ''{\"kv_connector_extra_config\": 3}''']",
        "command: [sh, -c, 'vllm serve --kv-transfer-config ''{\"kv_connector_extra_config\": 3}''  # don''t stop']",
        "args: ['--kv_transfer_config={\"kv_connector_extra_config\": 3}']",
    ],
)
def test_configuration_in_command_is_found(tmp_path, command):
    ((level, _, text),) = faults(tmp_path, (COMMAND, command))
    assert level == "error"
    assert text.endswith("""got '{"kv_connector_extra_config": 3}'""")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("3", "is not a valid manifest"),
        ("kind: Deployment\nmetadata: {name: a}", "is not a valid manifest"),
        ("kind: Service", "no container in"),
        (EXAMPLE.replace("500Gi", "many"), "'many' is not a quantity of bytes"),
        (EXAMPLE.replace("500Gi", "1e999"), "is not a valid manifest: OverflowError"),
        (EXAMPLE.replace(COMMAND, "command: [sh, -c, 'vllm --kv-transfer-config ''{']"), "ValueError: No closing"),
        (EXAMPLE.replace("name: disk\n              mount", "name: dsk\n              mount"), "volume 'dsk'"),
    ],
)
def test_check_invalid_manifest_is_bad_input(tmp_path, text, message):
    path = tmp_path / "kubernetes.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        check_manifest(path)


def test_check_manifest_command_fails_on_errors(run, tmp_path):
    path = tmp_path / "kubernetes.yaml"
    path.write_text(EXAMPLE.replace("sizeLimit: 72Gi", "sizeLimit: 8Gi"))
    status, _, err = run("check", "--manifest", path)
    assert (status, f"1 of 5 checks of {path} failed" in err) == (1, True)


def test_service_monitor_selects_port_of_service():
    monitor = yaml.safe_load((CONTAINERS / "service-monitor.yaml").read_text())
    (service,) = [one for one in yaml.safe_load_all(EXAMPLE) if one["kind"] == "Service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
