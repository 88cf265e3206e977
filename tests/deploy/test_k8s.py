"""deploy/k8s: every manifest fits Kubernetes' own schemas, and what one file says of another is so."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollout_service import __version__
from rollout_service.api.access import ACCESS, EVERYBODY
from rollout_service.keys import Role, read_keys
from rollout_service.server import LAST_RESORT_S
from rollout_service.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "k8s"
VERSIONS = ("1.29", kubernetes_validate.latest_version())
"""From the oldest whose schemas know every field used here to the newest."""
Manifest = dict[str, Any]


def manifests() -> Iterator[tuple[str, Manifest]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            yield f"{path.relative_to(FOLDER)} {manifest['kind']} {manifest['metadata']['name']}", manifest


ALL = dict(manifests())
BY_SCHEMA = {name: manifest for name, manifest in ALL.items() if manifest["kind"] != "ServiceMonitor"}


def one(kind: str, name: str) -> Manifest:
    (found,) = [m for m in ALL.values() if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod_of(manifest: Manifest) -> Manifest:
    pod: Manifest = manifest["spec"]["template"]["spec"]
    return pod


DEPLOYMENT = one("Deployment", "rollout-service")
POD = pod_of(DEPLOYMENT)
(CONTAINER,) = POD["containers"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The ConfigMap as the folder it is mounted as."""
    for name, text in one("ConfigMap", "rollout-service")["data"].items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def settings(config: Path) -> Settings:
    return load_settings(config / "rollout.toml", environ={})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BY_SCHEMA)
def test_a_manifest_fits_the_schema_of_its_kind(name: str, version: str) -> None:
    kubernetes_validate.validate(BY_SCHEMA[name], version, strict=True)


def test_the_schemas_refuse_a_misspelled_field() -> None:
    broken = copy.deepcopy(DEPLOYMENT)
    pod_of(broken)["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_a_manifest_of_every_kind_is_there() -> None:
    kinds = {manifest["kind"] for manifest in ALL.values()}
    assert kinds == {
        *("Deployment", "Service", "ConfigMap", "Secret", "PersistentVolumeClaim", "ServiceMonitor"),
        *("PodDisruptionBudget", "NetworkPolicy", "StatefulSet"),
    }


def test_what_is_not_to_be_applied_as_it_stands_is_not_applied_with_the_folder() -> None:
    """`kubectl apply -f deploy/k8s` takes the folder's own files: an example Secret there would replace the keys."""
    assert {m["kind"] for name, m in ALL.items() if "/" not in name.split()[0]}.isdisjoint({"Secret", "StatefulSet"})


def test_names_of_pods_services_and_policies_agree() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    service = one("Service", "rollout-service")
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert one("PodDisruptionBudget", "rollout-service")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = one("NetworkPolicy", "rollout-service")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (port,) = CONTAINER["ports"]
    assert [p["targetPort"] for p in service["spec"]["ports"]] == [port["name"]]
    assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [port["name"]]
    for manifest in ALL.values():
        assert "namespace" not in manifest["metadata"], "kubectl -n decides"


def test_the_service_monitor_finds_the_service_and_sends_a_key() -> None:
    monitor, service = one("ServiceMonitor", "rollout-service"), one("Service", "rollout-service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    allowed = ACCESS[f"GET {endpoint['path']}"]
    assert allowed is not None
    assert Role.READ in allowed
    credentials = endpoint["authorization"]["credentials"]
    assert endpoint["authorization"]["type"] == "Bearer"
    assert credentials["key"] in one("Secret", credentials["name"])["stringData"]
    # The operator makes the Service's name the `job`, and alerts.yml knows the service by that.
    assert f'up{{job="{service["metadata"]["name"]}"}}' in (ROOT / "deploy" / "alerts.yml").read_text()


def test_probes_ask_for_routes_that_are_open_to_them() -> None:
    (port,) = CONTAINER["ports"]
    paths = {name: CONTAINER[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert all(probe["port"] == port["name"] for probe in paths.values())
    assert all(ACCESS[f"GET {probe['path']}"] is EVERYBODY for probe in paths.values())
    assert {name: probe["path"] for name, probe in paths.items()} == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",  # a restart mends no halt
        "readinessProbe": "/readyz",
    }


def test_a_halted_service_keeps_its_address() -> None:
    """It is not ready then, and POST /resume has to reach it."""
    assert one("Service", "rollout-service")["spec"]["publishNotReadyAddresses"] is True


def test_two_processes_never_share_the_store() -> None:
    assert DEPLOYMENT["spec"]["replicas"] == 1
    assert DEPLOYMENT["spec"]["strategy"] == {"type": "Recreate"}


def test_it_is_killed_later_than_it_ends_by_itself() -> None:
    assert POD["terminationGracePeriodSeconds"] > LAST_RESORT_S


def test_the_pod_fits_the_restricted_profile() -> None:
    pod, container = POD["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["allowPrivilegeEscalation"] is False
    assert container["readOnlyRootFilesystem"] is True
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & POD.keys()
    assert not any("hostPath" in volume for volume in POD["volumes"])


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "rollout-service"), ("StatefulSet", "vllm")])
def test_what_a_pod_mounts_is_there(kind: str, name: str) -> None:
    manifest = one(kind, name)
    pod = pod_of(manifest)
    claims = {template["metadata"]["name"] for template in manifest["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == volumes.keys() | claims
    for volume in volumes.values():
        if "configMap" in volume:
            one("ConfigMap", volume["configMap"]["name"])
        if "persistentVolumeClaim" in volume:
            one("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        if "secret" in volume:
            keys = one("Secret", volume["secret"]["secretName"])["stringData"]
            assert {item["key"] for item in volume["secret"]["items"]} == keys.keys()


def test_the_configuration_of_the_config_map_loads(settings: Settings) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["args"] == ["serve", "--config", f"{mounts['config']}/rollout.toml"]
    assert settings.server.host == "0.0.0.0"  # noqa: S104 - the address inside the pod
    assert settings.server.port == CONTAINER["ports"][0]["containerPort"]
    assert settings.server.keys_file == f"{mounts['keys']}/keys.toml"
    assert str(settings.store.sqlite_path).startswith(f"{mounts['data']}/")


def test_the_rewards_of_the_config_map_are_there(config: Path, settings: Settings) -> None:
    for reward in settings.rewards:
        module, _, function = reward.function.partition(":")
        found = runpy.run_path(str(config / f"{module}.py"))[function]
        assert found(completion_ids=[[], [1] * 256], prompts=["", ""], completions=["", ""]) == [1.0, 0.5]


def test_engines_are_all_pods_behind_the_headless_service(settings: Settings) -> None:
    vllm, service = one("StatefulSet", "vllm"), one("Service", "vllm")
    (container,) = pod_of(vllm)["containers"]
    port = container["ports"][0]["containerPort"]
    assert [engine.url for engine in settings.engines] == [f"dns://{vllm['spec']['serviceName']}:{port}"]
    assert service["spec"]["clusterIP"] == "None"
    assert [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "weights"] == (
        settings.weights.allowed_paths
    )


def test_only_the_service_and_clients_reach_an_engine_in_dev_mode() -> None:
    policy = one("NetworkPolicy", "vllm")["spec"]
    assert policy["podSelector"] == one("StatefulSet", "vllm")["spec"]["selector"]
    (rule,) = policy["ingress"]
    allowed = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert allowed == [{"app.kubernetes.io/name": "rollout-service"}, {"rollout-service/client": "true"}]


def test_the_example_keys_have_the_form_of_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(one("Secret", "rollout-service-keys")["stringData"]["keys.toml"])
    assert {entry.role for entry in read_keys(path)} == {Role.ADMIN, Role.TRAINER, Role.READ}


def test_the_image_is_of_this_version() -> None:
    assert CONTAINER["image"].partition(":")[2] == __version__
