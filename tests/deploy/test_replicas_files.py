"""Replicas as files: the compose profile, its helpers, deploy/k8s-replicas, docs/replicas.md; and that they agree."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollout_service import __version__
from rollout_service.api.access import ACCESS, EVERYBODY
from rollout_service.server import KEEP_ALIVE_S, LAST_RESORT_S
from rollout_service.settings import Settings, load_settings
from rollout_service.settings.problems import table_of
from rollout_service.settings.stores import StoreSettings
from tests.deploy.load_balancer import CONFIG, program

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REPLICA, SINGLE, POSTGRES = (SERVICES[name] for name in ("replica", "rollout-service", "postgres"))
FOLDER = ROOT / "deploy" / "k8s-replicas"
PAGE = (ROOT / "docs" / "replicas.md").read_text()
VERSIONS = ("1.29", kubernetes_validate.latest_version())
MAX_CONNECTIONS = 100
"""PostgreSQL's own default, of which three are kept for its administrators."""
Manifest = dict[str, Any]


def manifests(folder: Path) -> Iterator[tuple[str, Manifest]]:
    for path in sorted(folder.rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            yield f"{path.relative_to(folder)} {manifest['kind']} {manifest['metadata']['name']}", manifest


ALL = dict(manifests(FOLDER))
BY_SCHEMA = {name: manifest for name, manifest in ALL.items() if manifest["kind"] != "ServiceMonitor"}
OF_ONE = dict(manifests(ROOT / "deploy" / "k8s"))


def one(kind: str, name: str, among: dict[str, Manifest] = ALL) -> Manifest:
    (found,) = [m for m in among.values() if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod_of(manifest: Manifest) -> Manifest:
    pod: Manifest = manifest["spec"]["template"]["spec"]
    return pod


DEPLOYMENT, BALANCER = one("Deployment", "rollout-service"), one("Deployment", "rollout-service-load-balancer")
STATEFUL = one("StatefulSet", "postgres")


def variables(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service["environment"].items()}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container → what is mounted there."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service.get("volumes", [])}


# compose


def test_a_replica_is_the_service_on_another_store() -> None:
    """Everything the single one has, but its port, its build, its volume and what only a database needs."""
    own = {"profiles", "environment", "volumes", "tmpfs", "networks", "deploy", "depends_on"}
    assert {k: v for k, v in REPLICA.items() if k not in own} == {
        k: v for k, v in SINGLE.items() if k not in own | {"ports", "build"}
    }
    ours, theirs = variables(SINGLE), variables(REPLICA)
    assert theirs.keys() - ours.keys() == {"PGPASSFILE"}
    assert {name for name in ours if ours[name] != theirs[name]} == {"ROLLOUT_STORE__URL"}
    assert SINGLE["depends_on"].items() <= REPLICA["depends_on"].items()
    assert mounts(SINGLE).items() - mounts(REPLICA).items() == {("/data", "state")}
    assert set(SINGLE["networks"]) < set(REPLICA["networks"])


def test_the_profile_brings_replicas_their_database_and_what_stands_in_front() -> None:
    named = {name for name, service in SERVICES.items() if service.get("profiles") == ["replicas"]}
    assert named == {"database-password", "postgres", "replica", "load-balancer"}
    assert REPLICA["deploy"]["replicas"] == "${REPLICAS:-3}"
    assert SINGLE["deploy"]["replicas"] == "${SINGLE_SERVICE:-1}"


def test_the_image_can_speak_to_postgresql() -> None:
    assert SINGLE["build"]["args"]["EXTRAS"].startswith("postgres,")
    assert re.search(r'^ARG EXTRAS="?(\w+,)*postgres\b', (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)


def test_the_configuration_of_a_replica_loads() -> None:
    environ = {name: value for name, value in variables(REPLICA).items() if name.startswith("ROLLOUT_")}
    settings = load_settings(ROOT / "deploy" / "rollout.toml", environ=environ)
    assert settings.store.url == "postgresql://rollout@postgres/rollout"
    assert settings.server.keys_file == "/keys/keys.toml"


def test_only_replicas_reach_the_database() -> None:
    assert POSTGRES["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if "database" in service.get("networks", [])} == {
        "postgres",
        "replica",
    }
    assert "ports" not in POSTGRES
    assert POSTGRES["user"] == "postgres"


def test_a_replica_keeps_nothing_in_its_container() -> None:
    """Else every new one would leave a nameless volume for the image's /data."""
    assert "/data" in REPLICA["tmpfs"]
    assert "/data" not in mounts(REPLICA)


def test_the_password_is_made_once_and_lies_where_both_sides_look(tmp_path: Path) -> None:
    making = SERVICES["database-password"]
    _, script, folder = making["entrypoint"]
    assert mounts(making)[script] == "./deploy/database_password.py"
    assert mounts(making)[folder] == mounts(POSTGRES)["/password"] == mounts(REPLICA)["/password"]
    assert making["network_mode"] == "none"
    command = [sys.executable, str(ROOT / "deploy" / "database_password.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    password, passfile = tmp_path / "password", tmp_path / "pgpass"
    made = password.read_text()
    assert len(made) > 40
    assert passfile.read_text() == f"postgres:5432:rollout:rollout:{made}\n"
    assert stat.S_IMODE(password.stat().st_mode) == 0o644
    assert stat.S_IMODE(passfile.stat().st_mode) == 0o600, "clients refuse one that others can read"
    passfile.unlink()
    subprocess.run(command, check=True)
    assert password.read_text() == made
    assert made in passfile.read_text()
    where = {"/password": tmp_path}
    assert where["/password"] / Path(variables(POSTGRES)["POSTGRES_PASSWORD_FILE"]).name == password
    assert where["/password"] / Path(variables(REPLICA)["PGPASSFILE"]).name == passfile


def test_the_password_fits_the_address_replicas_are_given() -> None:
    url = variables(REPLICA)["ROLLOUT_STORE__URL"]
    match = re.fullmatch(r"postgresql://(\w+)@(\w+)/(\w+)", url)
    assert match
    user, host, database = match.groups()
    assert (user, database) == (variables(POSTGRES)["POSTGRES_USER"], variables(POSTGRES)["POSTGRES_DB"])
    assert host in SERVICES
    assert f'f"{host}:5432:{database}:{user}:' in (ROOT / "deploy" / "database_password.py").read_text()


def test_the_database_has_connections_for_all_and_one_replica_more() -> None:
    """As many as the load balancer finds would not fit: docs/replicas.md says how many do."""
    replicas = int(re.findall(r":-(\d+)", REPLICA["deploy"]["replicas"])[0])
    assert (replicas + 1) * (StoreSettings().pool_size + 2) <= MAX_CONNECTIONS - 3


# load balancer


def test_haproxy_accepts_its_configuration() -> None:
    done = subprocess.run(
        [program(), "-c", "-f", str(CONFIG)], env={"REPLICAS": "replica"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr.upper()


def test_the_load_balancer_asks_for_names_that_are_there_and_open_routes() -> None:
    text, service = CONFIG.read_text(), SERVICES["load-balancer"]
    assert mounts(service)["/usr/local/etc/haproxy/haproxy.cfg"] == "./deploy/haproxy.cfg"
    assert variables(service) == {"REPLICAS": "replica"}
    assert service["ports"] == ["127.0.0.1:${REPLICAS_PORT:-8081}:8080"]
    assert "engines" not in service.get("networks", []), "engines are no business of its"
    probes = re.findall(r"http-check send meth GET uri (\S+)", text)
    assert probes == ["/readyz", "/livez"]
    assert all(ACCESS[f"GET {path}"] is EVERYBODY for path in probes)
    (own,) = re.findall(r"monitor-uri (\S+)", text)
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:8080{own}"
    (container,) = pod_of(BALANCER)["containers"]
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} == {own}


def test_idle_connections_end_at_the_load_balancer_first() -> None:
    (idle,) = re.findall(r"timeout http-keep-alive (\d+)s", CONFIG.read_text())
    assert int(idle) < KEEP_ALIVE_S


def test_calls_that_last_longer_than_a_poll_are_the_ones_that_may() -> None:
    (line,) = set(re.findall(r"http-request set-timeout server 2h if (.+)", CONFIG.read_text()))
    assert line == "{ path /policy_version } || { path_beg /engines }"
    assert {"POST /policy_version", "POST /engines", "DELETE /engines/{engine_id}"} <= ACCESS.keys()


def test_the_load_balancer_ends_before_it_is_killed() -> None:
    (last,) = re.findall(r"hard-stop-after (\d+)s", CONFIG.read_text())
    assert int(SERVICES["load-balancer"]["stop_grace_period"].removesuffix("s")) > int(last)
    before = int(pod_of(BALANCER)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod_of(BALANCER)["terminationGracePeriodSeconds"] > before + int(last)


# Prometheus


def test_prometheus_scrapes_every_replica_by_itself() -> None:
    jobs = {
        job["job_name"]: job
        for job in yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    }
    (asked,) = jobs["rollout-service"]["dns_sd_configs"]
    assert asked["type"] == "A"
    assert [name.removesuffix(".") for name in asked["names"]] == ["rollout-service", "replica"]
    assert all(name.endswith(".") for name in asked["names"]), "else the key could go to a machine of another domain"
    prometheus = SERVICES["prometheus"]["networks"]
    assert all(set(prometheus) & set(SERVICES[name.removesuffix(".")]["networks"]) for name in asked["names"])


# Kubernetes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BY_SCHEMA)
def test_a_manifest_fits_the_schema_of_its_kind(name: str, version: str) -> None:
    kubernetes_validate.validate(BY_SCHEMA[name], version, strict=True)


def test_what_is_not_to_be_applied_as_it_stands_is_not_applied_with_the_folder() -> None:
    assert {m["kind"] for name, m in ALL.items() if "/" not in name.split()[0]}.isdisjoint({"Secret", "StatefulSet"})


def test_a_pod_of_a_replica_is_that_of_the_single_service_without_its_disk() -> None:
    ours, theirs = pod_of(one("Deployment", "rollout-service", OF_ONE)), pod_of(DEPLOYMENT)
    own = {"containers", "volumes", "topologySpreadConstraints"}
    assert {k: v for k, v in theirs.items() if k not in own} == {k: v for k, v in ours.items() if k not in own}
    (single,), (replica,) = ours["containers"], theirs["containers"]
    assert {k: v for k, v in replica.items() if k not in {"env", "volumeMounts"}} == {
        k: v for k, v in single.items() if k != "volumeMounts"
    }
    assert [mount for mount in single["volumeMounts"] if mount["name"] != "data"] == replica["volumeMounts"]
    assert [volume for volume in ours["volumes"] if volume["name"] != "data"] == theirs["volumes"]
    assert replica["image"].partition(":")[2] == __version__


def test_a_new_replica_is_there_before_an_old_one_goes() -> None:
    assert DEPLOYMENT["spec"]["replicas"] > 1
    assert DEPLOYMENT["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert pod_of(DEPLOYMENT)["terminationGracePeriodSeconds"] > LAST_RESORT_S


@pytest.mark.parametrize("manifest", [DEPLOYMENT, BALANCER], ids=["replicas", "load-balancer"])
def test_pods_spread_over_nodes_and_leave_one_by_one(manifest: Manifest) -> None:
    selector = manifest["spec"]["selector"]
    (spread,) = pod_of(manifest)["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]) == ("kubernetes.io/hostname", selector)
    budget = one("PodDisruptionBudget", manifest["metadata"]["name"])["spec"]
    assert (budget["maxUnavailable"], budget["selector"]) == (1, selector)
    assert one("NetworkPolicy", manifest["metadata"]["name"])["spec"]["podSelector"] == selector


def test_names_and_ports_agree() -> None:
    for manifest in ALL.values():
        assert "namespace" not in manifest["metadata"], "kubectl -n decides"
    for manifest in (DEPLOYMENT, BALANCER, STATEFUL):
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert manifest["spec"]["selector"]["matchLabels"] == labels
    pairs = {
        "rollout-service-replicas": DEPLOYMENT,
        "rollout-service": BALANCER,
        "postgres": STATEFUL,
    }
    for name, manifest in pairs.items():
        service = one("Service", name)["spec"]
        assert service["selector"] == manifest["spec"]["selector"]["matchLabels"]
        (port,) = pod_of(manifest)["containers"][0]["ports"]
        assert [p["targetPort"] for p in service["ports"]] == [port["name"]]
        policy = one("NetworkPolicy", manifest["metadata"]["name"])["spec"]
        assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [port["name"]]


def test_trainers_call_the_same_address_as_with_one_service() -> None:
    one_port = one("Service", "rollout-service", OF_ONE)["spec"]["ports"]
    assert one("Service", "rollout-service")["spec"]["ports"] == one_port
    bind = re.findall(r"bind :(\d+)", CONFIG.read_text())
    assert bind == [str(pod_of(BALANCER)["containers"][0]["ports"][0]["containerPort"])]


def test_the_load_balancer_finds_every_replica_ready_or_not() -> None:
    (container,) = pod_of(BALANCER)["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    replicas = one("Service", "rollout-service-replicas")
    name, _, rest = environment["REPLICAS"]["value"].partition(".")
    assert name == replicas["metadata"]["name"]
    assert rest == "$(NAMESPACE).svc.cluster.local"
    assert list(environment) == ["NAMESPACE", "REPLICAS"], "only a variable that stands before can be named"
    assert replicas["spec"]["clusterIP"] == "None"
    assert replicas["spec"]["publishNotReadyAddresses"] is True
    assert replicas["spec"]["ports"][0]["port"] == 8080
    assert '"${REPLICAS}:8080"' in CONFIG.read_text()


def test_the_load_balancer_has_the_configuration_that_was_tested() -> None:
    assert one("ConfigMap", "rollout-service-load-balancer")["data"] == {"haproxy.cfg": CONFIG.read_text()}
    (container,) = pod_of(BALANCER)["containers"]
    assert container["image"] in SERVICES["load-balancer"]["image"]
    assert container["args"][-1] == "/config/haproxy.cfg"


def test_prometheus_takes_the_name_alerts_know() -> None:
    monitor, service = one("ServiceMonitor", "rollout-service"), one("Service", "rollout-service-replicas")
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    job = labels[monitor["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy" / "alerts.yml").read_text()
    found = [m for m in ALL.values() if m["kind"] == "Service" and m["metadata"]["labels"].items() >= labels.items()]
    assert found == [service], "the load balancer has no metrics of the run"
    before = one("ServiceMonitor", "rollout-service", OF_ONE)
    assert monitor["spec"]["endpoints"] == before["spec"]["endpoints"]


def test_replicas_and_the_example_database_have_one_password_and_one_address() -> None:
    secret = one("Secret", "rollout-service-database")
    (container,) = pod_of(DEPLOYMENT)["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    reference = environment["PGPASSWORD"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": secret["metadata"]["name"], "key": "password"}
    assert secret["stringData"].keys() == {reference["key"]}
    (password,) = [volume["secret"] for volume in pod_of(STATEFUL)["volumes"] if "secret" in volume]
    assert password["secretName"] == reference["name"]
    database = {entry["name"]: entry["value"] for entry in pod_of(STATEFUL)["containers"][0]["env"]}
    url = environment["ROLLOUT_STORE__URL"]["value"]
    assert url == variables(REPLICA)["ROLLOUT_STORE__URL"]
    service = one("Service", "postgres")["metadata"]["name"]
    assert url == f"postgresql://{database['POSTGRES_USER']}@{service}/{database['POSTGRES_DB']}"
    assert {database[name] for name in ("POSTGRES_INITDB_ARGS",)} == {variables(POSTGRES)["POSTGRES_INITDB_ARGS"]}
    allowed = one("NetworkPolicy", "postgres")["spec"]["ingress"][0]["from"]
    assert allowed == [{"podSelector": DEPLOYMENT["spec"]["selector"]}]


@pytest.mark.parametrize("manifest", [DEPLOYMENT, BALANCER, STATEFUL], ids=["replicas", "load-balancer", "postgres"])
def test_every_pod_fits_the_restricted_profile_and_mounts_what_is_there(manifest: Manifest) -> None:
    pod = pod_of(manifest)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    claims = {template["metadata"]["name"] for template in manifest["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]} | claims


# docs/replicas.md


def test_the_page_names_files_settings_routes_and_variables_that_exist() -> None:
    for path in set(re.findall(r"\b(?:deploy|docs|examples)/[\w./-]*\w", PAGE)):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
    tables = {name: table_of(field.annotation) for name, field in Settings.model_fields.items()}
    named = set(re.findall(rf"`({'|'.join(tables)})\.(\w+)", PAGE))
    assert len(named) > 5
    for table, field in named:
        fields = tables[table]
        assert fields is not None
        assert field in fields.model_fields, f"{table}.{field}"
    routes = set(re.findall(r"\b((?:GET|POST|DELETE) /[a-z_/{}]*)", PAGE))
    assert routes
    assert routes <= ACCESS.keys()
    example = (ROOT / ".env.example").read_text()
    for name in ("REPLICAS", "SINGLE_SERVICE", "REPLICAS_PORT", "COMPOSE_PROFILES"):
        assert name in PAGE
        assert re.search(rf"^{name}=", example, re.MULTILINE), name


def test_services_the_page_names_are_of_the_compose_file() -> None:
    for command in re.findall(
        r"^docker compose (?:exec|run|stop|start|cp|logs)(?: -\S+)* ([a-z-]+)", PAGE, re.MULTILINE
    ):
        assert command in SERVICES
