"""The tools of `legroom mcp`, on the official MCP SDK."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from legroom.api.simulate_request import simulation_json, trace_of_request
from legroom.deployments.described import deployment_from_request, refuse_local_model
from legroom.errors import LegroomError
from legroom.facts.releases import release as known_release
from legroom.planning.machine import Machine, plan_deployment
from legroom.version import __version__

_INSTRUCTIONS = """\
legroom knows where every byte of a GPU goes when vLLM serves a model. Ask `plan` before a server starts, `size` for
the GPUs that a model needs, `diagnose` with the log when it failed, `explain` for the long story of an entry that a
diagnosis names (LR203), `search_catalog` to find one by words or by a line of a log, `simulate` to see whether settings
hold a load, `lint` to check scripts, manifests, alert rules and dashboards. Sizes are bytes. Nothing is changed on any
machine."""

_MAX_LOG_CHARACTERS = 32 << 20
_READ_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_READ_ONLY_WITH_HUB = _READ_ONLY.model_copy(update={"open_world_hint": True})


def _argument(description: str, *examples: Any, **constraints: Any) -> Any:
    """The pydantic field of a tool's argument, with description, examples and `constraints` such as `ge=1`."""
    return Field(description=description, examples=list(examples) or None, **constraints)


_WHICH_MODEL = "A Hub id, a bundled short name, or (stdio only) a folder with a config.json."
_WHICH_FLAGS = "vLLM engine arguments by their Python or command-line names; what is left out is the default."
_QUERIES = ("cumem", "kv_too_small_for_max_len", "No available memory for the cache blocks", "碎片")
_COMMAND_EXAMPLE = "vllm serve Qwen/Qwen3-8B --max-model-len 32768"
_LOG_EXAMPLE = "INFO ... vLLM API server version 0.10.2\n...\nValueError: No available memory ..."
_MIX_EXAMPLE = "poisson rate=8 prompt=lognormal(1200,0.8) output=uniform(10,400) requests=2000"
Model = Annotated[str | None, _argument(_WHICH_MODEL, "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b")]
Gpu = Annotated[str, _argument("A GPU by name, or a size.", "h100", "a100-80gb", "rtx4090", "24GiB")]
OptionalGpu = Annotated[str | None, _argument("A GPU by name, or a size, where the log does not say.", "h100", "24GiB")]
Gpus = Annotated[int | None, _argument("How many GPUs there are (default: what the flags need).", ge=1, le=4096)]
Vllm = Annotated[str | None, _argument("The vLLM release (default: the newest known).", "0.32.0", "0.10.2")]
Flags = Annotated[dict[str, Any] | None, _argument(_WHICH_FLAGS, {"max_model_len": 32768, "tensor_parallel_size": 2})]
CommandLine = Annotated[
    str | None, _argument("In place of model and flags: the command that is run.", _COMMAND_EXAMPLE)
]
Language = Annotated[Literal["en", "zh"], Field(description="English or Chinese.")]
Size = Annotated[str | None, Field(description="A size such as 2GiB.", examples=["2GiB", "79.1GiB"])]


class CatalogHit(TypedDict):
    """One entry of the catalog, in short."""

    id: str
    cause: str
    phase: str | None
    title: str
    score: float


class SearchResult(TypedDict):
    """Entries that fit, the best first."""

    query: str
    hits: list[CatalogHit]


class SimulatedRequest(TypedDict, total=False):
    """One request of a load. Arrivals count scheduler steps."""

    prompt_len: Annotated[int, Field(ge=1)]
    output_len: Annotated[int, Field(ge=1)]
    arrival_step: Annotated[int, Field(ge=0)]
    id: str
    prefix_id: str
    prefix_len: Annotated[int, Field(ge=0)]
    priority: int


class LegroomServer(MCPServer[Any]):  # type: ignore[misc]
    """An MCP server that refuses unknown arguments, and says of wrong ones what to write."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Calls a tool; a ToolError names an argument that is wrong, or unknown: the SDK itself drops unknown ones."""
        schema = next((tool.input_schema for tool in await self.list_tools() if tool.name == name), None)
        if schema is not None and (unknown := sorted(set(arguments) - set(schema["properties"]))):
            where = "; vLLM's own arguments go into `flags`" if "flags" in schema["properties"] else ""
            known = ", ".join(schema["properties"])
            raise ToolError(f"{name} has no argument `{unknown[0]}`{where}. Its arguments are {known}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError) or schema is None:
                raise
            wrong = error.__cause__.errors()[0]
            argument = schema["properties"].get(str(wrong["loc"][0]), {})
            example = f", such as {argument['examples'][0]!r}" if argument.get("examples") else ""
            path = ".".join(map(str, wrong["loc"]))
            said = f"`{path}`: {wrong['msg']}. {argument.get('description', '')}".strip()
            raise ToolError(f"{name} cannot take {said.rstrip('.')}{example}") from None


def build_server(*, local_files: bool) -> MCPServer[Any]:
    """The MCP server with all tools; `local_files`: callers may name files of this machine."""
    server = LegroomServer("legroom", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    tools = ServerTools(local_files)
    for tool, hints in (
        (tools.plan, _READ_ONLY_WITH_HUB),
        (tools.size, _READ_ONLY_WITH_HUB),
        (tools.diagnose, _READ_ONLY_WITH_HUB),
        (explain, _READ_ONLY),
        (search_catalog, _READ_ONLY),
        (tools.simulate, _READ_ONLY_WITH_HUB),
        (lint, _READ_ONLY),
    ):
        server.add_tool(_with_tool_errors(tool), annotations=hints)
    return server


def _with_tool_errors(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, with each LegroomError turned into a ToolError of its message and hint."""

    @functools.wraps(tool)
    def called(*args: Any, **values: Any) -> Any:
        """Runs the tool; a LegroomError becomes a ToolError."""
        try:
            return tool(*args, **values)
        except LegroomError as error:
            raise ToolError(f"{error.message}. {error.hint}" if error.hint else error.message) from None

    return called


@dataclass(frozen=True)
class ServerTools:
    """The tools whose answer depends on whether callers may name files of this machine."""

    local_files: bool

    def plan(
        self,
        gpu: Gpu,
        model: Model = None,
        gpus: Gpus = None,
        vllm: Vllm = None,
        flags: Flags = None,
        command: CommandLine = None,
        gpu_memory: Annotated[Size, Field(description="Total of one GPU as the machine reports it.")] = None,
        gpu_used: Annotated[Size, Field(description="What other processes hold of one GPU.")] = None,
        explain_math: Annotated[bool, Field(description="Add the working behind every figure.")] = False,
    ) -> dict[str, Any]:
        """Predict what `vllm serve` does with a model on a GPU: whether it starts, and where every byte goes.

        Answers with verdict (fits, tight, does_not_fit), layout (bytes of weights, activations, graphs, KV cache,
        headroom), kv (blocks, tokens, concurrency, longest context), failure (what vLLM will say), advice (flags that
        fix it, each with its layout), command, and the confidence of every figure. No GPU is needed.
        """
        from legroom.planning.plan_json import plan_json

        what = deployment_from_request(model, command, flags, vllm, local_files=self.local_files)
        made = plan_deployment(what, Machine(gpu, gpus, gpu_memory, gpu_used), advice=True)
        return {**plan_json(made, explain_math), "notes": [*what.notes, *made.notes]}

    def size(
        self,
        model: Annotated[str, Field(description="A Hub id, a bundled short name, or (stdio only) a folder.")],
        context: Annotated[int, Field(ge=1, description="Tokens that a request may have.")] = 4096,
        concurrency: Annotated[int, Field(ge=1, description="Requests of that length at once.")] = 1,
        gpus: Annotated[list[str] | None, _argument("GPUs to try (default: the usual ones).", ["h100", "l4"])] = None,
        max_gpus: Annotated[int, Field(ge=1, le=64, description="The most of one GPU to try.")] = 8,
        vllm: Vllm = None,
        flags: Flags = None,
    ) -> dict[str, Any]:
        """Say which GPUs, and how many of each, hold a model at a context length and a concurrency.

        Answers with rows, one a GPU and one more where a quantized checkpoint needs fewer: count (0 where not even
        max_gpus hold it), verdict, how the model is split, what limits it, what it gives up, the command to run.
        """
        from legroom.api.size_report import size_deployment

        what = deployment_from_request(model, None, flags, vllm, local_files=self.local_files)
        return size_deployment(what, context, concurrency, max_gpus, gpus).json()

    def diagnose(
        self,
        log: Annotated[
            str | None, _argument("The text of the log, from the start of the server if possible.", _LOG_EXAMPLE)
        ] = None,
        path: Annotated[str | None, _argument("stdio only: a log file on this machine (plain, gzip or zstd).")] = None,
        command: Annotated[str | None, _argument("The command that was run, where the log does not show it.")] = None,
        model: Model = None,
        gpu: OptionalGpu = None,
        gpus: Gpus = None,
        vllm: Vllm = None,
    ) -> dict[str, Any]:
        """Say why a vLLM server failed: the cause, the lines that prove it, and the command that will work.

        Answers with verdict, phase, and findings ranked by confidence; each has cause, entry (read on with
        `explain`), evidence (line, text, facts), why, fixes (flags, env, steps, command, and the layout that the
        memory model computed for it) and dead_ends (what not to try). A healthy log is told as such.
        """
        from legroom.diagnosis.diagnosis_json import readings_json
        from legroom.diagnosis.fixes.failed_run import Hints
        from legroom.diagnosis.log_diagnosis import read_log

        if (log is None) == (path is None):
            raise LegroomError("say which log once", "give `log` (its text) or `path`")
        if model is not None:
            refuse_local_model(model, self.local_files)
        hints = Hints(command, model, gpu, gpus, vllm, local_models=self.local_files)
        if path is not None:
            if not self.local_files:
                raise LegroomError("files of this machine are not read over HTTP", "give the text as `log`")
            from legroom.vllm_logs.log_sources import pieces_of_file

            return readings_json([read_log(pieces_of_file(path), path, hints)])
        assert log is not None
        if not log.strip():
            raise LegroomError("the log is empty", "give the server's output, stderr included")
        if len(log) > _MAX_LOG_CHARACTERS:
            raise LegroomError("the log is too long for a call", "give `path`, or the last run only")
        return readings_json([read_log([log.encode("utf-8", "replace")], "log", hints)])

    def simulate(
        self,
        requests: Annotated[
            list[SimulatedRequest] | None,
            _argument("The load, request by request.", [{"arrival_step": 0, "prompt_len": 800, "output_len": 120}]),
        ] = None,
        mix: Annotated[
            str | None, _argument("In place of requests: a made-up mix. Needs step_ms.", _MIX_EXAMPLE)
        ] = None,
        num_blocks: Annotated[int | None, Field(ge=2, description="KV blocks, the null block included.")] = None,
        block_size: Annotated[int | None, Field(ge=1, description="Tokens a block (16).")] = None,
        max_num_seqs: Annotated[int | None, Field(ge=1, description="Sequences that run at once.")] = None,
        max_num_batched_tokens: Annotated[int | None, Field(ge=1, description="Tokens a step.")] = None,
        max_model_len: Annotated[int | None, Field(ge=1, description="Longest request in tokens.")] = None,
        enable_prefix_caching: Annotated[bool | None, Field(description="Whether prompts share blocks.")] = None,
        model: Model = None,
        gpu: OptionalGpu = None,
        gpus: Gpus = None,
        vllm: Vllm = None,
        flags: Flags = None,
        step_ms: Annotated[float | None, Field(gt=0, description="What a step takes, for arrivals in seconds.")] = None,
    ) -> dict[str, Any]:
        """Replay a load through vLLM's scheduler and block pool, without a model: does it hold?

        The pool is num_blocks, or that of the plan for model and gpu. Answers with steps, finished, preemptions,
        recomputed_tokens, peak_blocks, peak_running, rejected, wasted_slot_ratio and queueing.
        """
        trace = trace_of_request(requests, mix)
        plan = None
        if model is not None:
            if gpu is None:
                raise LegroomError("which GPU?", "give gpu beside model, or num_blocks alone")
            what = deployment_from_request(model, None, flags, vllm, local_files=self.local_files)
            plan = plan_deployment(what, Machine(gpu, gpus), advice=False)
        given: dict[str, int | bool | None] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
        }
        return simulation_json(trace, plan, given, step_ms)


def explain(
    id: Annotated[str, Field(description="An entry of the catalog.", examples=["LR203"])], lang: Language = "en"
) -> dict[str, Any]:
    """Tell the long story of one cause: signatures, root cause, arithmetic with a worked example, what helps, what not.

    Rates come with the number of public threads they were counted over; what nobody counted has none.
    """
    from legroom.explain.catalog_entries import entry
    from legroom.explain.entry import entry_json

    return entry_json(entry(id), lang)


def search_catalog(
    query: Annotated[
        str,
        _argument(
            "Words in English or Chinese, a cause label, or a log line.", *_QUERIES, min_length=1, max_length=4000
        ),
    ],
    limit: Annotated[int, Field(ge=1, le=50, description="At most this many.")] = 5,
    lang: Language = "en",
) -> SearchResult:
    """Find entries of the error catalog, the best first."""
    from legroom.explain.catalog_entries import entries, search, search_json

    return search_json(query, search(query, entries(), limit), lang)  # type: ignore[return-value]


def lint(
    text: Annotated[
        str,
        Field(min_length=1, max_length=2 << 20, description="The file: a script, unit, manifest, rules, dashboard."),
    ],
    name: Annotated[
        str, _argument("Its name: the ending says what it is.", "deploy.yaml", "start.sh", max_length=255)
    ] = "file",
    vllm: Annotated[
        str | None, Field(description="The vLLM release, or `any` (default: what the file names, else the newest).")
    ] = None,
) -> dict[str, Any]:
    """Name what is wrong in a file that starts or monitors vLLM: flags and series that do not exist, and the like.

    Answers with findings: rule, severity, line, message, and what to write instead. Nothing is run.
    """
    from legroom.lint.lint_report import report_json
    from legroom.lint.linter import LintOptions, lint_texts

    any_release = vllm == "any"
    options = LintOptions(known_release(vllm) if vllm and not any_release else None, any_release=any_release)
    return report_json(lint_texts([(name, text)], options))
