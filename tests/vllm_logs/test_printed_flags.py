from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.releases import release
from legroom.vllm_logs.printed_flags import engine_words, given_args, read_printed
from legroom.vllm_logs.startup_log import read_startups


def test_every_flag_of_a_dictionary_is_typed_again() -> None:
    printed = (
        "{'model_tag': 'org/model', 'port': 8102, 'served_model_name': ['a', 'b'], 'trust_remote_code': True, "
        "'tool_call_parser': 'hermes', 'enable_auto_tool_choice': True, 'max_model_len': 4096}"
    )
    typed_flags = given_args(printed, None, release("0.13.0"), from_llm=False)
    assert typed_flags.args.max_model_len == 4096
    assert typed_flags.args.others == (
        "--port",
        "8102",
        "--served-model-name",
        "a",
        "b",
        "--trust-remote-code",
        "--tool-call-parser",
        "hermes",
        "--enable-auto-tool-choice",
    )
    assert typed_flags.unknown == ()


def test_adapters_are_written_as_their_flag_takes_them() -> None:
    printed = "{'model_tag': 'm', 'lora_modules': [LoRAModulePath(name='sql', path='/l/sql', base_model_name=None)]}"
    assert given_args(printed, None, release("0.13.0"), from_llm=False).args.others == ("--lora-modules", "sql=/l/sql")


def test_a_value_that_is_not_shown_is_named() -> None:
    printed = "{'model': 'm', 'pooler_config': PoolerConfig(pooling_type='LAST', normalize=True), 'max_num_seqs': 8}"
    typed_flags = given_args(printed, None, release("0.11.0"), from_llm=True)
    assert typed_flags.unknown == ("--pooler-config",)
    assert typed_flags.args.max_num_seqs == 8


def test_a_line_that_was_cut_is_read_up_to_there_and_says_so() -> None:
    typed_flags = given_args("{'model': 'm', 'port': 8001, 'chat_templ", None, release("0.13.0"), from_llm=False)
    assert typed_flags.args.others == ("--port", "8001")
    assert len(typed_flags.unknown) == 1


def test_of_a_namespace_only_what_is_no_default_counts_as_given() -> None:
    namespace = (
        "host=None, port=8000, allowed_origins=['*'], model='org/model', trust_remote_code=True, dtype='auto', "
        "max_model_len=8192, gpu_memory_utilization=0.9, max_num_seqs=256, seed=7, "
        "config_format=<ConfigFormat.AUTO: 'auto'>, dispatch_function=<function serve at 0x7f>"
    )
    typed_flags = given_args(None, namespace, release("0.8.1"), from_llm=False)
    assert typed_flags.args.others == ("--trust-remote-code", "--seed", "7")
    assert typed_flags.args.max_model_len == 8192
    assert typed_flags.args.gpu_memory_utilization is None


def test_the_names_inside_a_value_are_not_flags() -> None:
    printed = "{'model_tag': 'target', 'speculative_config': {'model': 'draft', 'num_speculative_tokens': 3}}"
    assert given_args(printed, None, release("0.13.0"), from_llm=False).args.model == "target"


def test_the_engines_line_shows_what_was_given_beside_memory() -> None:
    log = (
        "INFO 01-02 03:04:05 llm_engine.py:161] Initializing an LLM engine (v0.5.0) with config: model='m', "
        "tokenizer='m', tokenizer_mode=auto, revision=None, trust_remote_code=True, dtype=torch.float16, "
        "max_seq_len=8000, download_dir='/cache', load_format=LoadFormat.AUTO, seed=0, served_model_name=chat)"
    )
    startup = read_startups(log)[0]
    assert startup.args.others == ("--trust-remote-code", "--download-dir", "/cache", "--served-model-name", "chat")


_PLAIN = st.one_of(st.booleans(), st.integers(-5, 9), st.text("ab,{}'\"()= ", max_size=8), st.none())


@given(st.dictionaries(st.from_regex(r"[a-z]{2,8}", fullmatch=True), _PLAIN, max_size=6))
def test_what_python_prints_is_read_back(values: dict[str, object]) -> None:
    assert dict(read_printed(repr(values)).values) == values
    assert read_printed(repr(values)).is_whole


def test_a_value_that_an_issue_cuts_off_is_not_known() -> None:
    config = "config: model='m', load_format={}, tensor_parallel_size=1"
    assert engine_words(config.format("..."), "m", None) == ()
    assert engine_words(config.format("LoadFormat.GGUF"), "m", None) == ("--load-format", "gguf")
