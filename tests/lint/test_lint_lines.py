"""What single lines of files around a server give away, also in files of other tools and in templates."""

import pytest

from legroom.facts import read_data
from legroom.lint.linter import LintOptions, lint_files, lint_texts

POD = "kind: Deployment\nspec: {containers: [{image: 'acme/vllm:1', ports: [{containerPort: 8000}]}]}\n"
SERVICE = "kind: Service\nmetadata: {name: vllm-a}\nspec:\n  type: LoadBalancer\n"


def rules(*texts):
    return {finding.rule for finding in lint_texts(texts, LintOptions()).findings}


BATCH = "#SBATCH --nodes=%d\n#SBATCH --gpus-per-node=4\n%svllm serve m/m --tensor-parallel-size %s\n"
RAY = "ray start --head --block &\nsleep 10\n"
SCALED = "kind: HorizontalPodAutoscaler\nspec:\n  scaleTargetRef:\n    kind: Deployment\n    name: vllm-a\n"
LIVENESS = "image: a/vllm:1\nlivenessProbe:\n  failureThreshold: %d\n  httpGet: {path: /health}\n  periodSeconds: %d\n"
GPU_ALONE = "kind: Pod\nimage: a/vllm:1\nresources:\n  limits:\n    nvidia.com/gpu: 1\n%s"
CARDS = "services:\n  vllm:\n    environment:\n      NVIDIA_VISIBLE_DEVICES: %s\n    deploy:\n      count: all\n"
STOP = "image: vllm/vllm-openai:v0.20.0\nterminationGracePeriodSeconds: %d\npreStop: {sleep: {seconds: 5}}\n"
RUNTIME = (
    "FROM nvidia/cuda:12.4.1-devel AS a\nRUN install gcc\nFROM nvidia/cuda:12.4.1-runtime\n%sRUN pip install vllm\n"
)
CHART = "image: '{{ .Values.vllm.image }}'\nenv:\n{{- range .Values.env }}\n- {{ . }}\n{{- end }}\n# vllm\n"
PUBLISHED = "services:\n  vllm:\n    image: acme/vllm:1\n    ports: ['1:8000']\n"
UNIT = "[Service]\nExecStart=/bin/vllm serve m/m\n[Install]\n"
INGRESS = "kind: Ingress\nspec:\n  ingressClassName: nginx\n  rules: [{name: vllm}]\n"
LINES = {
    "a chart's port that the server is not told": (
        "templates/a.yaml",
        CHART + "containerPort: {{ .Values.vllm.port }}\nargs: vllm serve m/m\n",
        "port-unreachable",
    ),
    "a blank after the equals sign": ("a.sh", "# vllm\nexport HF_HOME= /data/hub\n", "env-meaning"),
    "a variable that NCCL does not have": ("a.sh", "# vllm\nexport NCCL_SOCKET_IFNAMES=eth0\n", "env-unknown"),
    "a rollout that is waited for briefly": (
        "a.sh",
        "kubectl rollout status deployment/vllm --timeout=300s\n",
        "command-doubtful",
    ),
    "no memory requested": ("a.yaml", GPU_ALONE % "", "host-memory"),
    "no memory requested on one line": (
        "a.yaml",
        "kind: Pod\nimage: a/vllm:1\nresources: {limits: {nvidia.com/gpu: 1}}\n",
        "host-memory",
    ),
    "zero replicas": ("a.yaml", "kind: Deployment\nspec:\n  replicas: 0\n  image: a/vllm:1\n", "command-doubtful"),
    "a liveness probe of five seconds": ("a.yaml", LIVENESS % (5, 1), "probe-missing"),
    "a readiness probe that forgives nothing": (
        "a.yaml",
        "# vllm\nreadinessProbe:\n  failureThreshold: 1\n  timeoutSeconds: 1\n",
        "probe-missing",
    ),
    "readiness by a connection": ("a.yaml", "# vllm\nreadinessProbe:\n  tcpSocket: {port: 1}\n", "probe-missing"),
    "a fixed wait for Ray's nodes": ("a.sh", RAY + "vllm serve m/m\n", "command-doubtful"),
    "tensor parallelism over nodes": ("a.sh", BATCH % (2, "", "8"), "flag-costly"),
    "tensor parallelism over all nodes": ("a.sh", BATCH % (2, "", "$((SLURM_NNODES * 4))"), "flag-costly"),
    "Ray on one node": ("a.sh", BATCH % (1, "ray start --head\n", "4"), "command-doubtful"),
    "a key that the process list shows": ("a.sh", 'vllm serve m/m --api-key "$VLLM_API_KEY"\n', "secret-written"),
    "a choice of cards that Docker overrides": ("compose.yml", CARDS % "0", "env-meaning"),
    "a hasty autoscaler": (
        "a.yaml",
        SCALED + "  behavior:\n    scaleDown:\n      stabilizationWindowSeconds: 30\n",
        "rollout-stuck",
    ),
    "scaled by the use of GPUs": ("a.yaml", SCALED + "  metric: {name: gpu_utilization}\n", "rollout-stuck"),
    "nodes that are emptied": (
        "vllm/pool.yaml",
        "taints: [nvidia.com/gpu]\ndisruption:\n  consolidationPolicy: WhenEmptyOrUnderutilized\n",
        "rollout-stuck",
    ),
    "UCX inside one machine": ("a.sh", "# vllm\nNIXL=1\nexport UCX_TLS=self,sm\n", "env-meaning"),
    "a check that cannot fail": ("Dockerfile", 'RUN python3 -c "import vllm" || true\n', "command-doubtful"),
    "a last stage without a compiler": ("Dockerfile", RUNTIME % "", "command-doubtful"),
    "a password to be changed": ("values.yaml", "# vllm\nadminPassword: changeme-now\n", "secret-written"),
    "an argument that nothing uses": ("Dockerfile", "ARG VLLM_INSTALL_METHOD=source\n", "command-doubtful"),
    "an end before long answers": ("a.yaml", STOP % 30, "stop-too-short"),
    "every size compiled": ("a.yaml", f"# vllm\ncompile_sizes: {list(range(1, 60, 2))}\n", "flag-costly"),
    "a moving tag of a chart": ("values.yaml", "vllm:\n  repository: acme/vllm\n  tag: latest\n", "image-moving"),
    "a default that moves": ("compose.yaml", "x: acme/vllm:${VLLM_TAG:-latest}\n", "image-moving"),
    "a moving base": ("Dockerfile", "ARG BASE=latest\nFROM acme/vllm:${BASE}\n", "image-moving"),
    "Terraform": ("main.tf", 'image = "vllm/vllm-openai:latest"\n', "image-moving"),
    "requirements": ("requirements.txt", "vllm>=0.8\n", "image-moving"),
    "a package beside vLLM": ("Dockerfile", "FROM vllm/vllm-openai:v0.20.0\nRUN pip install ray\n", "image-moving"),
    "a branch": ("a.sh", "git clone https://github.com/me/vllm.git\n", "image-moving"),
    "a Service for everybody": ("service.yaml", SERVICE, "api-open"),
    "the host's network": ("a.yaml", "services: {vllm: {network_mode: host}}\n", "api-open"),
    "a role that listens everywhere": ("defaults/main.yml", "vllm_host: 0.0.0.0\n", "api-open"),
    "a key that is off": ("values.yaml", "# vllm\nvllm:\n  apiKeySecret:\n    enabled: false\n", "api-open"),
    "a privileged container": ("a.yaml", "vllm:\n  privileged: true\n", "rights-wide"),
    "a password": (".env", "VLLM_X=1\nADMIN_PASSWORD=hunter22\n", "secret-written"),
    "a volume that goes": ("a.yaml", "# vllm\nvllm:\n- name: hf-cache\n  emptyDir: {}\n", "cache-lost"),
    "a volume that is off": ("values.yaml", "vllm: 1\npersistence:\n  enabled: false\n", "cache-lost"),
    "no volume": ("a.yaml", POD, "cache-lost"),
    "no probe": ("a.yaml", POD, "probe-missing"),
    "no GPU": ("a.yaml", POD, "gpus-too-few"),
    "a long wait before the end": (
        "a.yaml",
        "vllm:\n  preStop:\n    exec:\n      command: [sleep, '60']\n",
        "stop-too-short",
    ),
    "the port of vLLM's processes": ("a.yaml", "env:\n- name: VLLM_PORT\n  value: '8000'\n", "env-meaning"),
    "twice the bytes": ("values.yaml", "vllm:\n  dtype: float32\n", "flag-costly"),
    "an old pin": ("app.py", "image.pip_install('vllm==0.6.3')\n", "release-unsafe"),
    "a loop that gives up": (
        "a.sh",
        "# vllm\nfor i in $(seq 1 60); do\n  curl :8000/health && break\n  sleep 2\ndone\n",
        "command-doubtful",
    ),
    "a play that gives up": (
        "tasks/main.yml",
        "- name: vllm\n  uri: {url: 'http://a/health'}\n  retries: 12\n  delay: 5\n",
        "command-doubtful",
    ),
    "a check without a start period": (
        "Dockerfile",
        "FROM acme/vllm:1\nHEALTHCHECK CMD curl :8000/health\n",
        "start-too-short",
    ),
    "less than the imports": (
        "values.yaml",
        "image:\n  repository: acme/vllm\nresources:\n  limits:\n    memory: 512Mi\n",
        "host-memory",
    ),
    "one core": ("a.yaml", "vllm:\n  limits:\n    cpu: '1'\n    nvidia.com/gpu: 1\n", "flag-costly"),
    "weights over the bus": ("a.sh", "vllm serve m/m --cpu-offload-gb 10\n", "flag-costly"),
    "one request at a time": ("a.sh", "vllm serve m/m --max-num-seqs 1\n", "flag-costly"),
    "a branch of a fork": ("Dockerfile", "RUN git clone -b new https://github.com/me/vllm.git\n", "image-moving"),
    "no subcommand": ("a.service", "[Service]\nExecStart=conda run -n x vllm --model m/m\n", "module-unknown"),
    "an image that is none": ("a.yaml", "kind: Pod\nspec:\n  image: vllm/vllm:latest\n", "container-command"),
    "a key of every example": (".env", "VLLM_X=1\nVLLM_API_KEY=EMPTY\nIMAGE=vllm/vllm-openai:v0.20.0\n", "api-open"),
    "every address": ("start.sh", "#!/bin/sh\nvllm serve m/m --port 8000\n", "api-open"),
    "a home of root": ("a.yaml", "vllm:\n  runAsUser: 1000\n  mountPath: /root/.cache\n", "path-missing"),
    "a second GPU for an update": ("a.yaml", "services:\n  vllm:\n    order: start-first\n", "rollout-stuck"),
    "a cold start without a volume": (
        "app.py",
        "# vllm\n@app.function(image=vllm_image, gpu='H100')\n@modal.web_server(8000)\ndef serve(): ...\n",
        "cache-lost",
    ),
    "a type that is none": ("a.service", "[Service]\nExecStart=run vllm --dtype bf16\n", "flag-value"),
    "a unit that listens everywhere": (
        "vllm.service",
        "[Service]\nEnvironment=HOST=0.0.0.0\nExecStart=/srv/vllm.sh\n",
        "api-open",
    ),
    "kernels on a network mount": (
        "compose.yml",
        "services:\n  vllm:\n    volumes:\n      - /mnt/nas/triton:/root/.triton\n",
        "env-meaning",
    ),
    "a probe of the root": (
        "values.yaml",
        "image:\n  repository: vllm/vllm-openai\nlivenessProbe:\n  httpGet:\n    path: /\n    port: http\n",
        "probe-path",
    ),
    "a bot's secret": (".env", "VLLM_X=1\nBOT_SECRET=Ab3dEf6hIj9lMn2p\n", "secret-written"),
    "a key in a request": ("a.sh", "# vllm\nvllm serve m/m\ncurl -H 'X-API-KEY: acme-key-2026' :1\n", "secret-written"),
    "Grafana's own password": (
        "compose.yml",
        "services:\n  vllm:\n    image: a/vllm:1\n  g:\n    environment:\n    - GF_SECURITY_ADMIN_PASSWORD=admin\n",
        "secret-written",
    ),
    "a secret with a default": (
        "compose.yml",
        "services:\n  vllm:\n    image: a/vllm:1\n  g:\n    environment:\n    - GATE_KEY=${GATE_KEY:-let-me-in}\n",
        "secret-written",
    ),
    "a key that is none": ("a.sh", "vllm serve m/m --api-key EMPTY\n", "api-open"),
    "a slow kernel": ("values.yaml", "vllm:\n  quantization: awq\n", "flag-costly"),
    "a list that is none": ("Dockerfile", "FROM a/vllm:1\nENTRYPOINT [ ./start ]\n", "container-command"),
    "a check by python": (
        "compose.yml",
        "services:\n  vllm:\n    image: vllm/vllm-openai:v0.20.0\n    healthcheck:\n      test: [CMD, python, x.py]\n",
        "container-command",
    ),
    "serve twice": (
        "values.yaml",
        "image:\n  repository: vllm/vllm-openai\nmain:\n  args:\n    - serve\n    - m/m\n",
        "container-command",
    ),
    "all GPUs for one rank": (
        "compose.yml",
        "services:\n  vllm:\n    image: a/vllm:1\n    command: --tensor-parallel-size 1\n    x: [{count: all}]\n",
        "gpus-idle",
    ),
    "a job with idle GPUs": ("a.sbatch", "#!/bin/sh\n#SBATCH --gres=gpu:4\nvllm serve m/m\n", "gpus-idle"),
    "an option that Slurm does not read": ("a.sbatch", "#!/bin/sh\n#BATCH -N 1\nvllm serve m/m\n", "command-doubtful"),
    "a timeout above the interval": (
        "prometheus.yml",
        "global:\n  scrape_interval: 2s\n  scrape_timeout: 5s\nscrape_configs: [{job_name: vllm}]\n",
        "manifest-refused",
    ),
    "more ranks than GPUs": (".env", "VLLM_X=1\nTENSOR_PARALLEL_SIZE=2\nNUM_GPUS=1\n", "gpus-too-few"),
    "no DNS": (
        "policy.yaml",
        "kind: NetworkPolicy\nmetadata: {name: vllm}\nspec:\n  egress:\n    - ports: [{port: 8000}]\n",
        "port-unreachable",
    ),
    "a client that does not wait": ("a.sh", "vllm serve m/m > log &\npython3 worker.py\n", "command-doubtful"),
    "a service that does not wait": (
        "compose.yml",
        "services:\n  vllm:\n    image: a/vllm:1\n  web:\n    depends_on:\n      - vllm\n",
        "probe-missing",
    ),
    "a size that does nothing": (
        "compose.yml",
        "services:\n  vllm:\n    image: a/vllm:1\n    ipc: host\n    shm_size: 4g\n",
        "shm-missing",
    ),
    "zero replicas by the server's own series": (
        "keda.yaml",
        "kind: ScaledObject\nspec:\n  minReplicaCount: 0\n  triggers:\n  - query: sum(vllm:num_requests_waiting)\n",
        "rollout-stuck",
    ),
    "no setting of generation": (
        "a.sh",
        "vllm serve m/m --override-generation-config '{\"enable_thinking\": false}'\n",
        "flag-ignored",
    ),
    "a path in quotes": (
        "vllm.service",
        '[Service]\nEnvironmentFile="/etc/vllm.env"\nExecStart=/bin/vllm serve m/m\n',
        "env-meaning",
    ),
    "a path of one folder": ("a.sh", "vllm serve m/m --chat-template a.jinja\n", "path-missing"),
    "a public address": ("compose.yml", "services:\n  a:\n    x:\n    - VLLM_URL=http://8.8.8.8:8000\n", "api-open"),
    "the model as a flag": (
        "vllm.service",
        "[Service]\nExecStart=/bin/vllm serve --port 1 --model m/m\n",
        "flag-value",
    ),
    "one failure ends it": (
        "deploy.yml",
        "x: --gpu=1 --startup-probe=tcpSocket.port=8000,failureThreshold=1\nvllm: 1\n",
        "start-too-short",
    ),
    "two defaults of one variable": (
        "compose.yml",
        "services:\n  vllm:\n    command: --model ${MODEL:-a/m}\n  web:\n    environment:\n    - MODEL=${MODEL:-b/m}\n",
        "env-meaning",
    ),
    "a program that listens everywhere": (
        "run.py",
        "import subprocess\nsubprocess.run(f'python3 -m vllm.entrypoints.openai.api_server --port {port}')\n",
        "api-open",
    ),
    "a service that nothing starts again": ("compose.yml", PUBLISHED, "restart-missing"),
    "a container that nothing starts again": (
        "a.sh",
        "#!/bin/sh\ndocker run \\\n  -d a/vllm:1 m/m\n",
        "restart-missing",
    ),
    "a process that nothing starts again": ("a.sh", "nohup uv run vllm serve m/m &\n", "restart-missing"),
    "a unit that nothing starts again": ("vllm.service", UNIT, "restart-missing"),
    "a unit that does not wait": ("a.service", f"[Unit]\nWants=network-online.target\n{UNIT}", "command-doubtful"),
    "the user of systemd": ("a.service", UNIT.replace("[Service]", "[Service]\nUser=%u"), "rights-wide"),
    "Grafana for everybody": (
        "compose.yml",
        f"{PUBLISHED}  g:\n    environment:\n    - GF_AUTH_ANONYMOUS_ORG_ROLE=Admin\n",
        "command-doubtful",
    ),
    "a variable that LiteLLM does not expand": (
        "config.yaml",
        "model_list:\n- model: hosted_vllm/m\ngeneral_settings:\n  master_key: ${KEY}\n",
        "env-meaning",
    ),
    "a password in an address": (".env", "VLLM_X=1\nDB=postgresql://me:hunter22@db/x\n", "secret-written"),
    "a password of a store": (
        "compose.yml",
        f"{PUBLISHED}  s:\n    environment:\n    - A_PASSWORD=abcd\n",
        "secret-written",
    ),
    "weights beside the Hub's cache": ("a.sh", "vllm serve m/m --download-dir $HF_HOME\n", "cache-lost"),
    "memory without a size": ("a.yaml", f"{POD}volumes:\n- emptyDir:\n    medium: Memory\n  name: a\n", "host-memory"),
    "a tag of an architecture": ("a.yaml", "kind: Pod\nimage: ghcr.io/a/vllm-b:amd64\n", "image-moving"),
    "a short time of an Ingress": (
        "a.yaml",
        "kind: Ingress\nname: vllm\nnginx.ingress.kubernetes.io/proxy-read-timeout: '120'\n",
        "stop-too-short",
    ),
    "the usual time of an Ingress": ("a.yaml", INGRESS, "stop-too-short"),
    "a cache of old names": (
        "a.yaml",
        "# vllm\nenv:\n- name: HF_HOME\n  value: /a\n- name: TRANSFORMERS_CACHE\n  value: /a\n",
        "env-meaning",
    ),
    "one request at a time by default": ("a.sh", 'A="vllm serve m/m --max-num-seqs ${SEQS:-1}"\n', "flag-costly"),
    "every address behind other words": (
        "a.sh",
        '#!/bin/sh\ncd "$A" && X=$Y nohup uv run vllm serve m/m\n',
        "api-open",
    ),
    "a server that goes while it answers": (
        "a.yaml",
        "kind: ScaledObject\nspec:\n  minReplicaCount: 0\n  name: vllm\n",
        "rollout-stuck",
    ),
    "a store for everybody": ("compose.yml", f"{PUBLISHED}  q:\n    ports:\n    - 6333:6333\n", "command-doubtful"),
    "a unit that waits for no network": ("a.service", f"[Unit]\nAfter=network.target\n{UNIT}", "command-doubtful"),
    "a token of another name": (
        "compose.yml",
        f"{PUBLISHED}    environment:\n    - HUGGINGFACE_TOKEN=$T\n",
        "env-meaning",
    ),
    "a way of transfer that is gone": ("a.sh", "export HF_HUB_ENABLE_HF_TRANSFER=1\nvllm serve m/m\n", "env-meaning"),
    "a short wait": ("a.sh", "vllm serve m/m \\\n  --port 1 &\nsleep 2\npython3 a.py\n", "command-doubtful"),
    "a built server without a health check": (
        "compose.yml",
        "services:\n  a:\n    build:\n      dockerfile: vllm.Dockerfile\n    ports: ['1:8000']\n",
        "probe-missing",
    ),
    "Grafana's password in a script": (
        "a.sh",
        "vllm serve m/m &\nexport GF_SECURITY_ADMIN_PASSWORD=admin\n",
        "secret-written",
    ),
    "a base without a compiler": ("Dockerfile", RUNTIME.replace("-runtime", "-base") % "", "command-doubtful"),
    "a wait for the container alone": (
        "compose.yml",
        f"{PUBLISHED}  web:\n    depends_on:\n      vllm:\n        condition: service_started\n",
        "probe-missing",
    ),
    "a test that waits for nothing": (
        "ci.yml",
        "jobs:\n  a:\n    steps:\n    - run: |\n        vllm serve m/m --port 1 &\n        pytest tests\n",
        "command-doubtful",
    ),
    "a list that Helm prints": ("templates/a.yaml", CHART + "command: {{ .Values.command }}\n", "manifest-refused"),
    "a server of root": ("values.yaml", "vllm:\n  image: a/vllm:1\n  runAsUser: 0\n", "rights-wide"),
    "the memory of the node": ("a.yaml", "kind: Pod\nspec:\n  hostIPC: true\n  image: a/vllm:1\n", "rights-wide"),
    "an application that is none": (
        "a.yaml",
        "applications:\n- name: a\n  import_path: vllm.entrypoints.openai.api_server:app\n",
        "module-unknown",
    ),
    "more requests than run": (
        "a.yaml",
        "kind: Service\nspec:\n  containerConcurrency: 80\n  image: a/vllm:1\n  args: [--max-num-seqs, '16']\n",
        "flag-costly",
    ),
    "more requests than run, in a script": (
        "a.sh",
        "gcloud run deploy a --image a/vllm:1 --concurrency 80 --args=--max-num-seqs=16\n",
        "flag-costly",
    ),
    "a key that is none without its variable": ("a.sh", "vllm serve m/m --api-key ${KEY:-EMPTY}\n", "api-open"),
    "the newest wheel": ("a.sh", "curl -s api.github.com/repos/vllm-project/vllm/releases/latest\n", "image-moving"),
    "a model behind a flag": ("a.sh", "vllm serve --host 127.0.0.1 --model m/m\n", "flag-value"),
    "a bucket that is none": (
        "a.yaml",
        "kind: Pod\nspec:\n  bucketName: YOUR_BUCKET\n  image: a/vllm:1\n",
        "path-missing",
    ),
    "GPUs of one rank": (
        "compose.yml",
        f"{CARDS % 'all'}    command: --tensor-parallel-size 1\n".replace("count: all", "count: -1"),
        "gpus-idle",
    ),
    "a list that begins with another": (
        "compose.yml",
        f"{PUBLISHED}  web:\n    depends_on:\n      - db\n      - vllm\n",
        "probe-missing",
    ),
    "one sequence of a chart": ("values.yaml", "vllm:\n  maxNumSeqs: 1\n", "flag-costly"),
    "a tag that is a word": ("values.yaml", "image:\n  repository: vllm/vllm-openai\n  tag: gemma\n", "image-moving"),
    "a job without memory": ("a.sh", "#!/bin/sh\n#SBATCH --gres=gpu:1\nvllm serve m/m\n", "host-memory"),
    "backslashes in single quotes": ("a.sh", "vllm serve m/m --allowed-origins '[\\\"*\\\"]'\n", "flag-value"),
    "a program behind a variable": ("a.sh", '#!/bin/sh\nexec env A=1 "$VLLM_BIN" serve m/m --port 1\n', "api-open"),
    "servers of a loop": ("a.sh", "for P in 1 2; do\n  vllm serve m/m \\\n    --port $P &\ndone\n", "does-not-fit"),
}


@pytest.mark.parametrize("what", LINES)
def test_a_line_is_noted(what):
    path, text, rule = LINES[what]
    assert rule in rules((path, text))


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("values.yaml", "vllm:\n  repository: acme/vllm\n  tag: v0.20.0\n", "image-moving"),
        ("a.sh", "uv run --with vllm -- vllm serve m/m --host 127.0.0.1\n", "module-unknown"),
        ("a.yaml", "# vllm\nargs:\n- /model\nimage: a/vllm:1\nports: []\nmountPath: /model\n", "cache-lost"),
        ("a.sh", 'bash -c "vllm serve m/m --allowed-origins \'[\\"*\\"]\'"\n', "flag-value"),
        ("a.sh", "python a.py --backend vllm --model m/m\n", "module-unknown"),
        ("a.yml", "  a:\n    image: acme/vllm:1\n    tag: v1\n", "image-moving"),  # a part of a file to be copied
        ("a.sh", "#SBATCH --mem=0\nvllm serve m/m --host 127.0.0.1\n", "host-memory"),
        ("a.sh", "export VLLM_PORT=0\nvllm serve m/m\n", "env-meaning"),
        ("a.yaml", "kind: Pod\nenv:\n- name: VLLM_PORT\n  value: '0'\nimage: a/vllm:1\n", "env-meaning"),
        ("a.py", "@modal.web_server(8000, a=1)\ndef f(): run('vllm serve m/m --port 8000')\n", "port-unreachable"),
        ("a.py", "# vllm\n@modal.web_server(8000, requires_proxy_auth=True)\ndef f(): ...\n", "api-open"),
        ("a.sh", "vllm serve m/m --host 0.0.0.0 --ssl-keyfile k --ssl-certfile c --ssl-cert-reqs 2\n", "api-open"),
        ("a.sh", "vllm serve m/m &\npython3 wait_for_health.py\npytest tests\n", "command-doubtful"),
        ("a.sh", "gcloud run deploy a --concurrency 16 --args=--max-num-seqs=16,--image=vllm\n", "flag-costly"),
        ("a.yaml", "kind: Pod\nimage: a/vllm:1\nargs: [--tensor-parallel-size, '1']\n", "shm-missing"),
        ("a.sh", "export VLLM_TARGET_DEVICE=cpu\nvllm serve m/m --enforce-eager\n", "eager"),
        ("a.yaml", "kind: Pod\nnode: nvidia-gtx-2080ti\nargs: [--quantization, awq]\n# vllm\n", "flag-costly"),
        ("a.yaml", "kind: ConfigMap\ndata:\n  analysis-quantization: awq\n# vllm\n", "flag-costly"),
        ("templates/a.yaml", "{{- if .a -}}\nkind: A\n{{- else -}}\nkind: B\n{{- end }}\n", "manifest-refused"),
        ("a.service", f"{UNIT}DynamicUser=yes\nUser=vllm\n", "unit-sandbox"),
        ("a.sh", "# vllm\nusage='a.sh [--max-model-len N]'\n", "not-understood"),
        ("values.yaml", "vllm:\n  # tag: latest\n  tag: v0.20.0\n", "image-moving"),
        ("requirements.txt", "vllm==0.20.0\n", "image-moving"),
        ("app.py", "image.pip_install('vllm==0.20.0')\n", "release-unsafe"),
        (
            "a.sh",
            "# vllm\nfor i in $(seq 1 90); do\n  curl :8000/health && break\n  sleep 10\ndone\n",
            "command-doubtful",
        ),
        ("Dockerfile", "FROM acme/vllm:1\nHEALTHCHECK --start-period=10m CMD curl :8000/health\n", "start-too-short"),
        ("a.sh", "vllm serve m/m --max-num-seqs 16\n", "flag-costly"),
        ("start.sh", "#!/bin/sh\nvllm serve /m --served-model-name meta-llama/Llama-3.1-8B\n", "model-gated"),
        ("a.sh", "docker run -p 1:1 me/vllm-tuned:v0.0.1 --model /m\n", "release-unsafe"),
        ("a.sh", "for P in 1 2; do\n  CUDA_VISIBLE_DEVICES=$P vllm serve m/m --port $P &\ndone\n", "does-not-fit"),
        ("a.yaml", "other: {network_mode: host}\n", "api-open"),
        ("a.yaml", "vllm:\n- name: dshm\n  emptyDir: {medium: Memory}\n", "cache-lost"),
        ("a.yaml", "vllm:\n  password: ${PASSWORD}\n", "secret-written"),
        ("compose.yaml", "# vllm\nsecrets:\n  a_password:\n    file: ./secrets/a\n", "secret-written"),
        ("compose.yml", "services:\n  vllm: {x: '${MODEL:-a}'}\n  web: {x: '${MODEL:-a}'}\n", "env-meaning"),
        ("values.yaml", "vllm:\n  existingSecret: hf-token-secret-2026\n", "secret-written"),
        ("values.yaml", "vllm:\n  repository: a/litellm\n  tag: main-v1.41.0\n", "image-moving"),
        ("a.sh", "vllm serve m/m > log &\nwait_for :8000/health\npython3 a.py\n", "command-doubtful"),
        ("a.sh", "#SBATCH --gres=gpu:4\nvllm serve m/m --tensor-parallel-size 4\n", "gpus-idle"),
        ("prometheus.yml", "# vllm\nscrape_interval: 15s\nscrape_timeout: 5s\n", "manifest-refused"),
        ("compose.yml", "# vllm\nservices:\n  a:\n    x:\n    - VLLM_URL=http://10.8.8.8:8000\n", "api-open"),
        ("values.yaml", "image: vllm/vllm-openai:v0.24.0\nvllm:\n  quantization: awq\n", "flag-costly"),
        ("a.sh", "# vllm\nexport HF_HOME= HF_TOKEN=x\n", "env-meaning"),
        (
            "templates/a.yaml",
            CHART + "containerPort: {{ .Values.vllm.port }}\nargs: vllm serve m/m --port {{ .Values.vllm.port }}\n",
            "port-unreachable",
        ),
        ("a.sh", "# vllm\nexport NCCL_SOCKET_IFNAME=eth0 NCCL_LIB_DIR=/a\n", "env-unknown"),
        ("a.sh", "kubectl rollout status deployment/vllm-gateway --timeout=60s\n", "command-doubtful"),
        ("a.yaml", GPU_ALONE % "    memory: 8Gi\n", "host-memory"),
        ("a.yaml", LIVENESS % (3, 10), "probe-missing"),
        ("a.sh", RAY + "until ray status | grep 4; do sleep 1; done\nvllm serve m/m\n", "command-doubtful"),
        ("a.sh", BATCH % (2, "", "4 --pipeline-parallel-size 2"), "flag-costly"),
        ("a.sh", BATCH % (1, "ray start --head\n", "4 --distributed-executor-backend ray"), "command-doubtful"),
        ("compose.yml", CARDS % "all", "env-meaning"),
        ("a.yaml", SCALED + "  behavior:\n    scaleDown:\n      stabilizationWindowSeconds: 300\n", "rollout-stuck"),
        ("a.sh", "# vllm\nNIXL=1\nexport UCX_TLS=rc,sm,self\n", "env-meaning"),
        ("Dockerfile", RUNTIME % "RUN apt-get install gcc\n", "command-doubtful"),
        ("Dockerfile", "ARG VLLM_VERSION=0.20.0\nRUN pip install vllm==${VLLM_VERSION}\n", "command-doubtful"),
        ("a.yaml", STOP % 300, "stop-too-short"),
        ("compose.yml", PUBLISHED.replace("    ports", "    restart: always\n    ports"), "restart-missing"),
        ("compose.yml", PUBLISHED.replace("    ports: ['1:8000']\n", ""), "restart-missing"),
        ("a.sh", "#!/bin/sh\ndocker run -d --restart always acme/vllm:1 m/m\n", "restart-missing"),
        ("a.sh", "#!/bin/sh\ndocker run acme/vllm:1 m/m\n", "restart-missing"),
        ("vllm.service", UNIT.replace("[Install]", "Restart=always\n[Install]"), "restart-missing"),
        ("config.yaml", "model_list:\n- api_key: os.environ/KEY\n  model: hosted_vllm/m\n", "env-meaning"),
        (".env", "VLLM_X=1\nDB=postgresql://me:${PASSWORD}@db/x\n", "secret-written"),
        ("a.sh", "vllm serve m/m --download-dir $HF_HOME/hub\n", "cache-lost"),
        ("a.yaml", f"{POD}volumes:\n- emptyDir:\n    medium: Memory\n    sizeLimit: 1Gi\n", "host-memory"),
        ("a.yaml", f"{INGRESS}nginx.ingress.kubernetes.io/proxy-read-timeout: '600'\n", "stop-too-short"),
        ("a.sh", '#!/bin/sh\necho "then vllm serve m/m"\n', "api-open"),
        ("compose.yml", f"{PUBLISHED}    environment:\n    - HUGGINGFACE_TOKEN=$T\n    - HF_TOKEN=$T\n", "env-meaning"),
        (
            "a.sh",
            "vllm serve m/m &\nsleep 2\nfor i in $(seq 90); do curl :8000/health && break; sleep 10; done\n",
            "command-doubtful",
        ),
        ("a.sh", 'stop() { kill $(pgrep -f "$1"); }\nstop prometheus\n', "kill-by-pattern"),
        (
            "compose.yml",
            f"{PUBLISHED}  q:\n    command: --requirepass a\n    ports:\n    - 6379:6379\n",
            "command-doubtful",
        ),
        ("compose.yml", f"{PUBLISHED}  q:\n    ports:\n    - 127.0.0.1:6333:6333\n", "command-doubtful"),
        ("a.service", f"[Unit]\nAfter=network-online.target\n{UNIT}", "command-doubtful"),
        ("a.sh", "pip install hf_transfer\nexport HF_HUB_ENABLE_HF_TRANSFER=1\nvllm serve m/m\n", "env-meaning"),
        ("a.sh", "unset TRANSFORMERS_CACHE\nexport HF_HOME=/a\nvllm serve m/m\n", "env-meaning"),
        (
            "a.yaml",
            "kind: ScaledObject\nspec:\n  cooldownPeriod: 3600\n  minReplicaCount: 0\n  name: vllm\n",
            "rollout-stuck",
        ),
        ("mock/vllm.yaml", "kind: Deployment\nname: mock-vllm\nports: [{containerPort: 1}]\n", "cache-lost"),
        (
            "start.sh",
            "vllm serve m/m --port ${VLLM_PORT:-8000}\nunset \\\n  VLLM_HOST \\\n  VLLM_PORT\n",
            "env-meaning",
        ),
    ],
)
def test_a_line_that_is_right_or_not_about_vllm_is_left_alone(path, text, rule):
    assert rule not in rules((path, text))


def test_another_file_may_hold_the_key_the_volume_or_the_probe():
    key = ("secret.yaml", "env:\n- name: VLLM_API_KEY\n  valueFrom: {secretKeyRef: {name: a, key: b}}\n")
    assert "api-open" not in rules(("service.yaml", SERVICE), key)
    claim = ("claim.yaml", "kind: PersistentVolumeClaim\nspec: {claimName: persistentVolumeClaim}\n")
    assert "cache-lost" not in rules(("templates/a.yaml", POD + "# {{ x }}\nx: {{ .Values.x }}\n"), claim)


NAMES = {
    "a flag's name as a variable": (".env", "VLLM_GPU_MEMORY_UTILIZATION=0.9\n", "env-unknown"),
    "a variable of old releases": ("values.yaml", "vllm:\n  VLLM_USE_V1: '1'\n", "env-unknown"),
    "a flag that is gone": ("main.tf", 'command = "vllm serve m --num-scheduler-steps 8"\n', "flag-removed"),
    "a gated model": (".env", "VLLM_X=1\nMODEL=meta-llama/Llama-3.1-8B-Instruct\n", "model-gated"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name_is_judged_where_no_server_is_read(what):
    path, text, rule = NAMES[what]
    assert rule in rules((path, text))


def test_a_name_that_another_file_reads_pins_or_fills_in_is_left_alone():
    script = ("start.sh", 'vllm serve m --gpu-memory-utilization "$VLLM_GPU_MEMORY_UTILIZATION"\n')
    assert "env-unknown" not in rules((".env", "VLLM_GPU_MEMORY_UTILIZATION=0.9\n"), script)
    assert "flag-removed" not in rules(("main.tf", 'a = "vllm/vllm-openai:v0.8.5 --num-scheduler-steps 8"\n'))
    token = ("secret.yaml", "kind: ExternalSecret\nname: hf-token\n")
    assert "model-gated" not in rules((".env", "VLLM_X=1\nMODEL=meta-llama/Llama-3.1-8B-Instruct\n"), token)


def manifests(labels="a: b", space="x", target="http", backend="vllm-a"):
    pod = "{image: 'acme/vllm:1', ports: [{name: http, containerPort: 8000}]}"
    return (
        f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: d, namespace: x}}\nspec:\n"
        f"  template: {{metadata: {{labels: {{a: b}}}}, spec: {{containers: [{pod}]}}}}\n---\n"
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: vllm-a, namespace: {space}}}\n"
        f"spec: {{selector: {{{labels}}}, ports: [{{port: 80, targetPort: {target}}}]}}\n---\n"
        "apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: i}\n"
        f"spec: {{rules: [{{http: {{paths: [{{backend: {{service: {{name: {backend}}}}}}}]}}}}]}}\n"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, 0), ({"labels": "a: c"}, 1), ({"space": "y"}, 1), ({"target": "web"}, 1), ({"backend": "other"}, 1)],
)
def test_a_service_and_an_ingress_find_what_they_name(changes, found):
    findings = lint_texts([("a.yaml", manifests(**changes))], LintOptions()).findings
    assert sum(each.rule == "port-unreachable" for each in findings) == found


@pytest.mark.parametrize(
    ("kind", "settings", "severity"),
    [
        ("volumes", "external: true, driver: local", ["error"]),
        ("networks", "external: true, driver: bridge", ["note"]),
        ("networks", "external: true, name: b", []),
        ("volumes", "driver: local", []),
    ],
)
def test_what_is_external_has_no_settings(kind, settings, severity):
    found = lint_texts([("compose.yml", f"{PUBLISHED}{kind}:\n  a: {{{settings}}}\n")], LintOptions()).findings
    assert [each.severity for each in found if each.rule == "manifest-refused"] == severity


def test_a_container_name_of_two_services_is_refused_unless_profiles_part_them():
    service = "{image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, container_name: v%s}"
    pair = f"services:\n  a: {service}\n  b: {service}\n"
    assert "manifest-refused" in rules(("compose.yaml", pair % ("", "")))
    assert "manifest-refused" not in rules(("compose.yaml", pair % ("", ", profiles: [b]")))


def test_a_hook_after_the_start_keeps_probes_from_running():
    probe = "livenessProbe: {periodSeconds: 5}, args: [--model, Qwen/Qwen3-8B]"
    pod = f"apiVersion: v1\nkind: Pod\nspec: {{containers: [{{image: 'vllm/vllm-openai:v0.20.0', {probe}%s}}]}}\n"
    hook = ", lifecycle: {postStart: {exec: {command: [sh, -c, wait]}}}"
    assert "start-too-short" in rules(("a.yaml", pod % ""))
    assert "start-too-short" not in rules(("a.yaml", pod % hook))


def test_templates_and_files_of_other_tools_are_found_in_a_folder(tmp_path):
    for name in ("main.tf", "compose.template", "requirements-gpu.txt", "head-env.template"):
        (tmp_path / name).write_text("# vllm\n")
    assert len(lint_files([str(tmp_path)], LintOptions()).files) == 4


def test_every_row_says_what_is_wrong_and_what_to_do():
    for row in read_data("line_mistakes.json")["rows"]:
        assert row["message"] and row["suggestion"] and "(?P<at>" in row["pattern"], row


OTHERS = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.20.0
    command: --model m/m
  web:
    image: acme/web:latest
    environment: [VLLM_URL=http://vllm:8000]
    ports:
      - "80:8000"
    healthcheck:
      start_period: 10s
"""


def test_a_service_that_only_asks_vllm_is_not_judged():
    judged = {"image-moving", "api-open", "start-too-short"}
    assert judged.isdisjoint(rules(("compose.yaml", OTHERS)))
    assert judged <= rules(("compose.yaml", OTHERS.replace("acme/web", "acme/vllm")))


def sharing(*services):
    device = "{resources: {reservations: {devices: [{count: 1, capabilities: [gpu]}]}}}"
    lines = [f"  {name}: {{image: {image}, command: {words}, deploy: {device}}}" for name, image, words in services]
    return ("compose.yaml", "\n".join(("services:", *lines, "")))


def vllm(name, share):
    return name, "'vllm/vllm-openai:v0.20.0'", f"--model m/m --gpu-memory-utilization {share}"


@pytest.mark.parametrize(
    ("services", "is_noted"),
    [
        ([vllm("a", 0.4), vllm("b", 0.4)], False),
        ([vllm("a", 0.4), vllm("b", 0.4), vllm("c", 0.4)], True),
        ([vllm("a", 0.9), ("speech", "acme/stt:1", "run")], True),
        ([vllm("a", 0.5), ("speech", "acme/stt:1", "run")], False),
        ([vllm("a", 0.9), ("dcgm-exporter", "acme/dcgm:1", "run")], False),
    ],
)
def test_the_shares_of_a_card_are_added(services, is_noted):
    findings = lint_texts([sharing(*services)], LintOptions()).findings
    assert any("asks for" in each.message for each in findings) is is_noted


def test_what_a_template_an_extension_or_a_container_tells_is_no_mistake():
    unit = "[Service]\nExecStart=/usr/bin/vllm serve {{ model | default('m/m') }} --port 1\n"
    assert "unit-sandbox" not in rules(("vllm.service.j2", unit))
    assert "unit-sandbox" in rules(("vllm.service", unit.replace("{{ model | default('m/m') }}", "m/m | tee log")))
    assert "env-unknown" not in rules(("a.sh", "export VLLM_OMNI_X=1\nvllm serve m/m --omni\n"))
    script = ("start.sh", "pkill -f vllm.entrypoints.openai.api_server\n")
    assert "kill-by-pattern" in rules(script)
    assert "kill-by-pattern" not in rules(script, ("Dockerfile", 'FROM acme/vllm:1\nENTRYPOINT ["/start.sh"]\n'))
    compose = "services:\n  v:\n    image: vllm/vllm-openai\n    command:\n      - --dtype\n      - {{ type }}\n"
    assert "flag-value" not in rules(("compose.yml.j2", compose))


def test_two_volumes_at_one_place_are_refused():
    service = "services:\n  a: {image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, volumes: ['a:/m', 'b:/%s']}\n"
    assert "manifest-refused" in rules(("compose.yml", service % "m"))
    assert "two volumes" not in str(lint_texts([("compose.yml", service % "n")], LintOptions()).findings)


def test_a_limit_below_the_imports_is_an_error_whatever_the_gpus_are():
    service = "services:\n  a: {image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, mem_limit: %s}\n"
    found = {size: lint_texts([("a.yml", service % size)], LintOptions()).findings for size in ("2g", "6g")}
    assert ("host-memory", "error") in {(each.rule, each.severity) for each in found["2g"]}
    assert "host-memory" not in {each.rule for each in found["6g"]}


def test_a_variable_beside_its_flag_is_a_note():
    name, flag = "VLLM_DISABLE_CUSTOM_ALL_REDUCE", "--disable-custom-all-reduce"
    service = "services:\n  a: {image: 'vllm/vllm-openai:v0.20.0', environment: {%s: 1}, command: --model m/m %s}\n"
    severities = [
        next(
            each.severity
            for each in lint_texts([("a.yml", service % (name, words))], LintOptions()).findings
            if each.rule == "env-unknown"
        )
        for words in ("", flag)
    ]
    assert severities == ["warning", "note"]


def test_the_entry_point_of_an_old_image_is_named_as_it_is():
    service = "services:\n  a: {image: 'vllm/vllm-openai:%s', command: python3 -m vllm.entrypoints.openai.api_server}\n"
    texts = [str(lint_texts([("a.yml", service % tag)], LintOptions()).findings) for tag in ("v0.10.1", "v0.20.0")]
    assert ["runs `vllm serve`" in text for text in texts] == [False, True]


def test_every_line_of_a_mistake_is_named():
    image = "image: vllm/vllm-openai:latest"
    text = f"services:\n  a:\n    {image}\n  b:\n    {image}\n"
    (found,) = (each for each in lint_texts([("compose.yml", text)], LintOptions()).findings if "moves" in each.message)
    assert (found.place.line, "also at line 5" in found.message) == (3, True)


MONITOR = """\
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: vllm}
spec: {selector: {matchLabels: {app: vllm}}, endpoints: [{port: http}]}
"""


@pytest.mark.parametrize(
    ("labels", "port", "found"),
    [("{app: vllm}", "http", 0), ("{app: other}", "http", 1), ("{}", "http", 1), ("{app: vllm}", "web", 1)],
)
def test_a_monitor_finds_the_service_and_the_port_that_it_names(labels, port, found):
    service = f"apiVersion: v1\nkind: Service\nmetadata: {{name: v, labels: {labels}}}\n"
    service += f"spec: {{ports: [{{name: {port}, port: 8000}}]}}\n"
    findings = lint_texts([("monitor.yaml", MONITOR), ("service.yaml", service)], LintOptions()).findings
    assert sum(each.rule == "port-unreachable" for each in findings) == found
    template = ("monitor.yaml.j2", MONITOR.replace("app: vllm", "app: '{{ name }}'"))
    findings = lint_texts([template, ("service.yaml", service)], LintOptions()).findings
    assert sum(each.rule == "port-unreachable" for each in findings) == (found if labels != "{app: other}" else 0)


def test_a_key_that_only_the_client_gets_is_noted():
    server = "services:\n  vllm:\n    image: vllm/vllm-openai:v0.20.0\n    command: --model m/m\n"
    client = "  web:\n    environment:\n      API_KEY: ${VLLM_API_KEY}\n"
    assert "env-meaning" in rules(("compose.yml", server + client))
    own = "    environment:\n      VLLM_API_KEY: ${VLLM_API_KEY}\n"
    assert "env-meaning" not in rules(("compose.yml", server + own + client))


def test_long_comments_of_a_service_are_passed_in_one_go():
    comments = "    # about this service\n" * 200
    for head in ("services:\n  vllm:\n", "kind: HorizontalPodAutoscaler\n  # vllm\nscaleDown:\n", "livenessProbe:\n"):
        assert "cache-lost" not in rules(("vllm/compose.yml", head + comments + "    image: a/vllm:1\n"))


def test_a_block_of_comments_in_a_built_service_is_read_in_one_pass():
    """Comments are blanked by spaces; a pattern that can read such a line in two ways needs 2^60 steps for sixty."""
    comments = "    # a line that says nothing of the image\n" * 60
    llm = "  llm:\n    image: vllm/vllm-openai:latest\n    command: --model org/m\n"
    text = f"services:\n  web:\n    build: .\n{comments}{llm}"
    rules = {each.rule for each in lint_texts([("compose.yaml", text)], LintOptions()).findings}
    assert "image-moving" in rules


def test_a_predictor_with_many_deep_lines_is_read_in_one_pass():
    """A line that begins with blanks can be read in one way only, or forty of them need 10^40 steps."""
    args = "            - --flag=a\n" * 40
    text = (
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata:\n  name: llm\nspec:\n  predictor:\n"
        f"    containers:\n        - name: vllm\n          image: vllm/vllm-openai:latest\n          args:\n{args}"
    )
    rules = {each.rule for each in lint_texts([("isvc.yaml", text)], LintOptions()).findings}
    assert "image-moving" in rules
