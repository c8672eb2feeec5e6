"""A server that Kubernetes runs as a Deployment or StatefulSet. Needs the `kubernetes` extra. A restart is a rollout,
in which Kubernetes drains the pods. It is requested by an annotation with the action's token, so that a repeated
request starts no second rollout."""

import asyncio
import datetime
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from legroom.actions import platform
from legroom.live.metrics.kubernetes_source import load_kubernetes_config
from legroom.records import dataclass
from legroom.vllm.command_line import with_flags

RESTARTED_BY = "legroom/restarted-by"
_CONFLICT, _NOT_FOUND = 409, 404
_Answer = TypeVar("_Answer")
WorkloadKind = Literal["deployment", "stateful_set"]
WORKLOAD_KINDS: tuple[WorkloadKind, ...] = ("deployment", "stateful_set")


@dataclass(frozen=True)
class Workload:
    """One Deployment or StatefulSet. `container` is the one that runs vLLM; by default the first."""

    workload: str
    namespace: str = "default"
    kind: WorkloadKind = "deployment"
    container: str | None = None
    context: str | None = None
    settle_s: float = 10.0
    poll_s: float = 1.0
    """Poll interval of a rollout."""

    @property
    def name(self) -> str:
        """`Kubernetes deployment NAMESPACE/NAME`, for messages."""
        return f"Kubernetes {self.kind.replace('_', '')} {self.namespace}/{self.workload}"

    async def state(self) -> platform.State:
        """Identity: restart annotation and a hash of images and arguments; it runs if at least one replica is ready."""
        workload = await self._read_manifest()
        template, status, spec = workload["spec"]["template"], workload.get("status") or {}, workload["spec"]
        wanted = spec.get("replicas", 1)
        behind = status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0)
        rolling = behind or status.get("updatedReplicas", 0) < wanted or status.get("readyReplicas", 0) < wanted
        return platform.State(_template_identity(template), status.get("readyReplicas", 0) > 0, rolling)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Annotates the pod template, which starts a rollout, and waits for its end; ActionFailed past the deadline."""
        if request.launched is not None:
            await request.launched(0, "")
        restarted_at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        marks = {RESTARTED_BY: request.token, "kubectl.kubernetes.io/restartedAt": restarted_at}
        workload = await self._read_manifest()
        if _template_annotations(workload["spec"]["template"]).get(RESTARTED_BY) != request.token:
            await self._patch_manifest({"spec": {"template": {"metadata": {"annotations": marks}}}})
        end_s = time.monotonic() + request.deadline_s
        while (await self.state()).underway:
            if time.monotonic() > end_s:
                raise platform.ActionFailed(f"the rollout of {self.name} did not end within {request.deadline_s:g} s")
            await asyncio.sleep(self.poll_s)

    async def override_place(self) -> platform.Override:
        """The container's place in the workload, with its present arguments, command and environment."""
        container = self._server_container(await self._read_manifest())
        self._argument_words(container)
        before = {name: container.get(name) for name in ("args", "command", "env")}
        place = f"{self.namespace}/{self.kind}/{self.workload}/{container['name']}"
        return platform.Override(place, json.dumps(before))

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Patches the container. Kubernetes starts the rollout at once, and the following restart joins it."""
        container = self._server_container(await self._read_manifest())
        field, words = self._argument_words(container)
        changed: dict[str, Any] = {"name": container["name"], field: with_flags(words, change.flags)}
        env = {entry["name"]: entry for entry in container.get("env") or []}
        if change.env:
            env |= {name: {"name": name, "value": value} for name, value in change.env.items() if value is not None}
            dropped = [name for name, value in change.env.items() if value is None]
            changed["env"] = [entry for name, entry in env.items() if name not in dropped]
            changed["env"] += [{"name": name, "$patch": "delete"} for name in dropped]
        await self._patch_manifest({"spec": {"template": {"spec": {"containers": [changed]}}}})

    def _argument_words(self, container: dict[str, Any]) -> tuple[str, list[str]]:
        """(`args` or `command`, the words in it): the container's field with vLLM's flags; FlagsFixed without."""
        field = "args" if container.get("args") else "command"
        words: list[str] = container.get(field) or []
        if not words:
            hint = "write vLLM's arguments under `args:`"
            raise platform.FlagsFixed(f"{self.name} has no arguments of its own to change", hint)
        whole = [*(container.get("command") or ()), *(container.get("args") or ())]
        platform.require_server(whole, self.name, in_image=True)
        return field, words

    async def restore_flags(self, override: platform.Override) -> None:
        """Patches the container back to its earlier arguments and environment, which starts a rollout."""
        before = json.loads(override.before or "{}")
        changed = {name: before.get(name) for name in ("args", "command", "env")}
        if changed["env"] is not None:
            changed["env"] = [*changed["env"], {"$patch": "replace"}]
        changed["name"] = override.place.rpartition("/")[2]
        await self._patch_manifest({"spec": {"template": {"spec": {"containers": [changed]}}}})

    async def replicas(self) -> int:
        return int((await self._read_manifest())["spec"].get("replicas", 1))

    async def scale(self, replicas: int) -> None:
        await self._patch_manifest({"spec": {"replicas": replicas}})

    def _server_container(self, workload: dict[str, Any]) -> dict[str, Any]:
        """The configured container of the workload's pod template, else the first; ActionFailed if missing."""
        containers: list[dict[str, Any]] = workload["spec"]["template"]["spec"]["containers"]
        for container in containers:
            if self.container in (None, container["name"]):
                return container
        raise platform.ActionFailed(f"{self.name} has no container {self.container}")

    async def _read_manifest(self) -> dict[str, Any]:
        """The workload as the Kubernetes API returns it, as JSON; ActionFailed where it cannot be read."""

        def call(api: Any) -> Any:
            method = getattr(api.AppsV1Api(), f"read_namespaced_{self.kind}")
            workload = method(self.workload, self.namespace, _request_timeout=platform.QUERY_TIMEOUT_S)
            return api.ApiClient().sanitize_for_serialization(workload)

        manifest: dict[str, Any] = await asyncio.to_thread(_call_api, self.context, f"reading {self.name}", call)
        return manifest

    async def _patch_manifest(self, patch: dict[str, Any]) -> None:
        """Applies a strategic merge patch to the workload; ActionFailed where Kubernetes refuses it."""

        def call(api: Any) -> None:
            method = getattr(api.AppsV1Api(), f"patch_namespaced_{self.kind}")
            method(self.workload, self.namespace, patch, _request_timeout=platform.QUERY_TIMEOUT_S)

        await asyncio.to_thread(_call_api, self.context, f"changing {self.name}", call)


@dataclass(frozen=True)
class KubernetesLease:
    """A Lease object per group, so that only one sidecar of a cluster acts on it at a time."""

    namespace: str = "default"
    context: str | None = None

    async def take(self, group: str, holder: str, seconds: float) -> bool:
        """Takes the group's Lease for `seconds`; False if another holder's is valid or another writer was faster."""

        def take_lease(api: Any) -> bool:
            """Creates the Lease, or replaces it if it is this holder's, free or expired."""
            leases, name, lease = api.CoordinationV1Api(), _lease_name(group), self._read_lease(api, group)
            now, whole_s = datetime.datetime.now(datetime.UTC), max(1, round(seconds))
            times = {"acquire_time": now, "renew_time": now}
            spec = api.V1LeaseSpec(holder_identity=holder, lease_duration_seconds=whole_s, **times)
            if lease is None:
                made = api.V1Lease(metadata=api.V1ObjectMeta(name=name), spec=spec)
                return _unless_conflict(api, lambda: leases.create_namespaced_lease(self.namespace, made))
            lasts = datetime.timedelta(seconds=lease.spec.lease_duration_seconds or 0)
            has_expired = lease.spec.renew_time is None or bool(lease.spec.renew_time + lasts < now)
            if lease.spec.holder_identity not in (None, "", holder) and not has_expired:
                return False
            lease.spec = spec  # the API server refuses an outdated resourceVersion
            return _unless_conflict(api, lambda: leases.replace_namespaced_lease(name, self.namespace, lease))

        return await asyncio.to_thread(_call_api, self.context, "taking the lease", take_lease)

    async def release(self, group: str, holder: str) -> None:
        """Ends this holder's lease of the group; another holder's stays."""

        def release_lease(api: Any) -> None:
            """Removes the holder from the Lease, if it is this one."""
            leases, name, lease = api.CoordinationV1Api(), _lease_name(group), self._read_lease(api, group)
            if lease is not None and lease.spec.holder_identity == holder:
                lease.spec.holder_identity = None
                _unless_conflict(api, lambda: leases.replace_namespaced_lease(name, self.namespace, lease))

        await asyncio.to_thread(_call_api, self.context, "giving back the lease", release_lease)

    def _read_lease(self, api: Any, group: str) -> Any:
        """The group's Lease; None where there is none."""
        try:
            return api.CoordinationV1Api().read_namespaced_lease(
                _lease_name(group), self.namespace, _request_timeout=platform.QUERY_TIMEOUT_S
            )
        except api.ApiException as error:
            if error.status != _NOT_FOUND:
                raise
            return None


def _call_api(context: str | None, what: str, call: Callable[[Any], _Answer]) -> _Answer:
    """The result of `call(kubernetes.client)`, configured for the pod's own cluster or the kubeconfig's `context`;
    errors become `ActionFailed` "`what` failed"."""
    try:
        from kubernetes import client, config  # an extra, and slow to import
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        hint = "pip install 'legroom[kubernetes]'"
        raise platform.ActionFailed("Kubernetes needs an extra of legroom", hint) from error
    try:
        load_kubernetes_config(config, context)
        return call(client)
    except config.ConfigException as error:
        hint = "set KUBECONFIG"
        raise platform.ActionFailed(f"{what} failed: no Kubernetes configuration was found", hint) from error
    except client.ApiException as error:
        raise platform.ActionFailed(f"{what} failed: Kubernetes answered {error.status} {error.reason}") from error
    except (HTTPError, OSError) as error:
        raise platform.ActionFailed(f"{what} failed: Kubernetes cannot be reached ({type(error).__name__})") from error


def _template_annotations(template: dict[str, Any]) -> dict[str, str]:
    return (template.get("metadata") or {}).get("annotations") or {}


def _template_identity(template: dict[str, Any]) -> str:
    """A digest of a pod template's images, commands, env and restart annotation, which changes with each rollout."""
    names = ("image", "command", "args", "env")
    parts = [[container.get(name) for name in names] for container in template["spec"]["containers"]]
    annotations = _template_annotations(template)
    restarted = annotations.get(RESTARTED_BY, "") + annotations.get("kubectl.kubernetes.io/restartedAt", "")
    return f"{restarted or 'first'}@{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _unless_conflict(api: Any, call: Callable[[], object]) -> bool:
    """Makes the API call; returns False if another writer was faster (HTTP 409), else True."""
    try:
        call()
    except api.ApiException as error:
        if error.status == _CONFLICT:
            return False
        raise
    return True


def _lease_name(group: str) -> str:
    """A valid Kubernetes name for the group's Lease, unique by a hash."""
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in group.lower()).strip("-")[:40]
    return f"legroom-{kept or 'group'}-{hashlib.sha256(group.encode()).hexdigest()[:8]}"
