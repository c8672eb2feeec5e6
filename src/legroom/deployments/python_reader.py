"""Servers in Python source: command lines in lists and strings, and calls of LLM(...)."""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.deployments.markdown import START
from legroom.deployments.shell.lexer import Word, env_with_places, serve_words
from legroom.deployments.shell.shell_script import read_shell, subjects_of
from legroom.deployments.shell.simple_commands import SimpleCommand
from legroom.deployments.source_text import Text
from legroom.deployments.subjects import EngineCall, StartedServer, Subject, change_servers
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.facts.flags import all_flag_names, flag_name, flags_of
from legroom.facts.gpus import is_known_gpu
from legroom.facts.releases import Release, latest
from legroom.vllm.args import Usage
from legroom.vllm.flag_problems import explain_unknown, nearest_flags
from legroom.vllm.flag_values import FIELDS
from legroom.vllm.parse import FlagReader, ParsedArgs

_WORTH_PARSING = pattern("python_reader.worth_parsing")
_ENGINES: dict[str, Usage] = {"LLM": "llm", "EngineArgs": "llm", "AsyncEngineArgs": "serve"}
"""vLLM's engine classes, and whose defaults each of them has."""
_MODAL = re.compile(r"\bmodal\.(App|Stub|Image)\b")
_MODAL_GPU = re.compile(r"""\bgpu\s*=\s*["']([A-Za-z][\w-]*)(?::(\d+))?["']""")
_KEPT_BY_MODAL = pattern("python_reader.kept_by_modal")
_NOT_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
_NOT_KNOWN = object()
_UNKNOWN = "$value"  # Stands for a value that is known only when the program runs.


def python_subjects(source: Text) -> tuple[Subject, ...]:
    """The servers that a program starts; none for a text that is not Python."""
    if not _WORTH_PARSING.search(source.text):
        return ()
    try:
        tree = parse_python(source.text)
        program = _Program(source, tree)
        program.visit(tree)
    except (LegroomError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(program.subjects())


def parse_python(text: str) -> ast.Module:
    """The syntax tree of a source, without Python's warnings about it. Raises LegroomError for other texts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LegroomError("the Python source could not be read", f"{type(error).__name__}: {error}") from None


class _Program(ast.NodeVisitor):
    """The lists, scripts and engine calls of a program, by scope."""

    def __init__(self, source: Text, tree: ast.Module) -> None:
        self._source = source
        self._lines = source.text.split("\n")
        self._scope = 0
        self._lists: dict[tuple[int, str], list[Word]] = {}
        self._scripts: list[Text] = []
        self._calls: list[StartedServer] = []
        self.env: dict[str, Word] = {}
        self._constants = dict(_constants(tree))
        names = {"vllm": "vllm", **{name: name for name in _ENGINES}}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                is_vllms = (node.module or "").partition(".")[0] == "vllm"
                for alias in node.names:
                    if is_vllms and alias.name in _ENGINES:
                        names[alias.asname or alias.name] = alias.name
                    elif not is_vllms:
                        names.pop(alias.asname or alias.name, None)
            elif isinstance(node, ast.Import):
                names |= {alias.asname: "vllm" for alias in node.names if alias.name == "vllm" and alias.asname}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.pop(node.name, None)
        self._engines = names

    def subjects(self) -> Iterator[Subject]:
        """The servers that lists of words, shell scripts and engine calls in the source start."""
        place = self._source.place
        servers: list[Subject] = []
        for words in self._lists.values():
            if words:
                started = subjects_of(self._source, SimpleCommand(tuple(words), self.env), "shell")
                servers += [subject for subject in started if isinstance(subject, StartedServer)]
        for script in self._scripts:
            servers += read_shell(script, env=env_with_places(self.env, place)).subjects
        calls = (replace(server, env=self.env) for server in self._calls)
        yield from change_servers((*servers, *calls), self._on_modal)

    def _on_modal(self, server: StartedServer) -> StartedServer:
        """The server with the GPU of Modal's function, and no mounts if no volume is named; unchanged without Modal."""
        text = self._source.text
        named = {found for found in _MODAL_GPU.findall(text) if is_known_gpu(found[0])}
        if not _MODAL.search(text) or server.in_container:
            return server
        server = replace(server, mounts=None if _KEPT_BY_MODAL.search(text) else ())
        name, count = named.pop() if len(named) == 1 else ("", "")
        return replace(server, gpu_names=(name,), gpus=int(count or 1)) if name else server

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit a function's body in a scope of its own."""
        outer, self._scope = self._scope, node.lineno
        self.generic_visit(node)
        self._scope = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        """Visit both branches, or the one that runs where a constant of the module decides."""
        is_set = self._constants.get(getattr(node.test, "id", ""))
        for each in (
            node.test,
            *(node.body if is_set is not False else ()),
            *(node.orelse if is_set is not True else ()),
        ):
            self.visit(each)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip a string statement (a docstring), which is no command."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record `cmd = [...]` and `os.environ["NAME"] = "value"`."""
        target = node.targets[0]
        if isinstance(target, ast.Name) and _is_list(node.value):
            self._lists[self._scope, target.id] = list(self._list_words(node.value))
        elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
            name = target.slice.value if isinstance(target.slice, ast.Constant) else ""
            if isinstance(name, str) and name:
                self.env[name] = Word(self._literal_text(node.value), self._offset(node))
        else:
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Record `cmd += [...]` as more words of that list."""
        if isinstance(node.target, ast.Name) and _is_list(node.value):
            self._lists.setdefault((self._scope, node.target.id), []).extend(self._list_words(node.value))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Record `cmd.extend([...])`, `cmd.append(...)` and engine calls such as `LLM(...)`."""
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and node.args:
            key = (self._scope, called.value.id)
            if called.attr == "extend" and _is_list(node.args[0]) and key in self._lists:
                self._lists[key].extend(self._list_words(node.args[0]))
                return
            if called.attr == "append" and key in self._lists:
                self._lists[key].extend(self._item_words(node.args[0]))
                return
        if (name := self._engine_class(called)) is not None:
            model = [ast.keyword("model", node.args[0])] if node.args and not _names_no_model(node.args[0]) else []
            given = [pair for keyword in (*model, *node.keywords) for pair in self._keyword_values(keyword)]
            values = {name: value for name, value in given if value is not _NOT_KNOWN}
            call = EngineCall(name, values, tuple(name for name, value in given if value is _NOT_KNOWN))
            words, place = tuple(self._call_as_command(node)), self._source.place
            started = StartedServer("python", words, {}, place, place(words[0].offset), read_as=f"Python {name}(...)")
            self._calls.append(replace(started, call=call))
        self.generic_visit(node)

    def _engine_class(self, called: ast.expr) -> str | None:
        """The vLLM class that the call constructs (LLM, EngineArgs, ...); None for any other call."""
        if isinstance(called, ast.Name):
            return self._engines.get(called.id)
        is_vllms = isinstance(called, ast.Attribute) and ast.unparse(called.value) in self._engines
        return called.attr if isinstance(called, ast.Attribute) and is_vllms and called.attr in _ENGINES else None

    def visit_List(self, node: ast.List | ast.BinOp) -> None:
        """Record a list of words that is assigned to no name, or a sum such as `["vllm", "serve"] + more`."""
        if _is_list(node):
            self._lists[self._scope, f" {len(self._lists)}"] = list(self._list_words(node))
        else:
            self.generic_visit(node)

    visit_BinOp = visit_List

    def visit_Dict(self, node: ast.Dict) -> None:
        """Record the VLLM_ and PYTORCH_ variables of a dictionary such as `env={"VLLM_NAME": "value"}`."""
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"(VLLM|PYTORCH)_[A-Z_0-9]+", name):
                self.env[name] = Word(self._literal_text(value), self._offset(key or value))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant | ast.JoinedStr) -> None:
        """Keep a string or f-string that is a whole command line as a script, unknown values as placeholders."""
        text = self._literal_text(node)
        if START.match(text.lstrip()) and " -" in text:
            at = self._source.place(self._offset(node))
            self._scripts.append(Text(self._source.path, text, at.line, (at.column,)))

    visit_JoinedStr = visit_Constant

    def _list_words(self, node: ast.expr) -> Iterator[Word]:
        """The words of a list or tuple expression, `+` and names of known lists resolved."""
        if isinstance(node, ast.BinOp):
            yield from self._list_words(node.left)
            yield from self._list_words(node.right)
        elif isinstance(node, ast.List | ast.Tuple):
            for item in node.elts:
                yield from self._item_words(item)
        elif isinstance(node, ast.Name) and (self._scope, node.id) in self._lists:
            yield from self._lists[self._scope, node.id]

    def _item_words(self, node: ast.expr) -> Iterator[Word]:
        """The words of one list item; a `--flag value` text becomes two."""
        if isinstance(node, ast.Starred):
            yield from self._list_words(node.value)
            return
        if isinstance(node, ast.IfExp):
            sides, is_known = [node.body, node.orelse], self._constants.get(getattr(node.test, "id", ""))
            if isinstance(is_known, bool):
                sides = sides[not is_known :][:1]
            elif not all(self._literal_text(side).startswith("--") for side in sides):
                sides = sides[:1]
            for side in sides:
                yield from self._item_words(side)
            return
        text = self._literal_text(node)
        offset = self._offset(node) + isinstance(node, ast.Constant)
        flag, space, value = text.partition(" ")
        if space and flag.startswith("--") and flag_name(flag) in all_flag_names():
            # Such a list is joined into one shell line.
            yield from (Word(flag, offset, flag), Word(value.strip(), offset, value))
        else:
            yield Word(text, offset, text)

    def _literal_text(self, node: ast.expr) -> str:
        """The text of a literal, f-string or known constant, with a placeholder for what is not known."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._literal_text(part) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._literal_text(node.value)
        if isinstance(node, ast.Name):
            value = self._constants.get(node.id)
            return str(value) if isinstance(value, str | int | float) else _UNKNOWN
        return _UNKNOWN

    def _call_as_command(self, node: ast.Call) -> Iterator[Word]:
        """The model and the keyword arguments as a `vllm serve` command."""
        yield from serve_words(self._offset(node))
        if node.args and not _names_no_model(node.args[0]):
            yield from self._item_words(node.args[0])
        for keyword in node.keywords:
            offset = self._source.start_of(keyword.lineno - 1) + self._column(keyword.lineno, keyword.col_offset)
            for name, value in self._keyword_values(keyword):
                flag = flag_name(name)
                if flag not in all_flag_names() and not nearest_flags(flag, latest()):
                    continue  # an argument that is not a flag
                words = [f"{flag}={_UNKNOWN}"] if value is _NOT_KNOWN else _flag_words(flag, value)
                yield from (Word(text, offset) for text in words)

    def _keyword_values(self, keyword: ast.keyword) -> list[tuple[str, Any]]:
        """(name, value) of a keyword argument, or of each in `**{...}`; `_NOT_KNOWN` for no literal or constant."""
        value = keyword.value
        if isinstance(value, ast.Name) and value.id in self._constants:
            literal = self._constants[value.id]
        else:
            try:
                literal = ast.literal_eval(value)
            except _NOT_LITERAL:
                return [(keyword.arg or "**", _NOT_KNOWN)]
        if keyword.arg is None and isinstance(literal, dict):
            return [(str(name), inner) for name, inner in literal.items()]
        return [(keyword.arg or "**", literal)]

    def _offset(self, node: ast.expr | ast.stmt) -> int:
        """The node's offset in the source, in characters."""
        return self._source.start_of(node.lineno - 1) + self._column(node.lineno, node.col_offset)

    def _column(self, line: int, byte_column: int) -> int:
        """The column in characters for ast's column in UTF-8 bytes, on this line (counted from 1)."""
        return len(self._lines[line - 1].encode()[:byte_column].decode(errors="replace"))


def _flag_words(flag: str, value: Any) -> list[str]:
    """The flag and its value as command-line words; empty for None, `...`, and False of a flag that vLLM has."""
    if value is None or value is ... or (value is False and flag in all_flag_names()):
        return []
    if isinstance(value, bool):
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value, default=str)]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)] if value else []
    return [flag, str(value)]


def _names_no_model(node: ast.expr) -> bool:
    """Whether the first argument names no model: `LLM(...)` with an ellipsis, or `LLM(*args)`."""
    return isinstance(node, ast.Starred) or (isinstance(node, ast.Constant) and node.value is ...)


def _is_list(node: ast.expr) -> bool:
    """Whether the expression is a list, or a sum with a list in it."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_list(node.left) or _is_list(node.right))
    return isinstance(node, ast.List)


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of each module-level name that is assigned a literal."""
    assigned = ((target, node.value) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    for target, value in assigned:
        if isinstance(target, ast.Name):
            with contextlib.suppress(*_NOT_LITERAL):
                yield target.id, ast.literal_eval(value)


def parse_call(call: EngineCall, release: Release) -> ParsedArgs:
    """The literal arguments of a call, parsed as flags of this release, with a FlagProblem for each that it refuses."""
    reading = FlagReader(release, [])
    table = {flag.dest: flag for flag in flags_of(release).values()}
    for name, value in call.values.items():
        if value is None:
            continue
        flag = table.get(name)
        if flag is None:
            reading.problems.append(explain_unknown(flag_name(name), release))
        else:
            kind = FIELDS.get(flag.dest, "")
            if isinstance(value, str) and not kind.startswith("str") and flag.kind in ("int", "human", "float"):
                reading.convert_and_store(flag, flag.dest, value)
            elif kind.startswith("Mapping") and isinstance(value, int) and not isinstance(value, bool):
                reading.store(flag, {"level": value})
            elif _has_type(kind, value):
                reading.store(flag, tuple(value) if isinstance(value, list) and kind.startswith("tuple") else value)
            else:
                reading.problem(flag.name, "bad_value", f"{flag.dest}={value!r} is not what {flag.name} takes")
    return ParsedArgs(reading.to_args(_ENGINES[call.name], {}), tuple(reading.problems))


def _has_type(kind: str, value: Any) -> bool:
    """Whether a Python literal has the type of an engine argument (`kind`: `int`, `Mapping` ...; empty for any)."""
    if not kind:
        return isinstance(value, str | int | float | bool | list | tuple | dict)
    if isinstance(value, bool):
        return kind.startswith("bool")
    if kind.startswith("tuple"):
        return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)
    types: dict[str, Any] = {"bool": bool, "int": int, "float": int | float, "Mapping": dict}
    return isinstance(value, next((types[name] for name in types if kind.startswith(name)), str))
