"""Generate text with a model, with or without an adapter.

    jax-dora generate --adapter RUN --prompt "12+30="
    jax-dora generate --model FOLDER --chat --prompt "Why is the sky blue?" --temperature 0.7

The completion of a single prompt is printed while it is generated. Several prompts are completed as
one batch, and printed as JSON Lines with "prompt" and "completion". Without --prompt, the prompt is
read from standard input.
"""

import argparse
import json
import sys
from typing import Any

import jax_dora
from jax_dora.lm.commands.flags import (
    add_end_token,
    add_setting,
    in_domain,
    make_settings,
    usage_errors,
)
from jax_dora.lm.commands.folders import adapted_model, add_model_flags, base_folder, text_settings
from jax_dora.lm.domains import integers
from jax_dora.lm.models import Sampling, generate, generate_steps
from jax_dora.lm.models.text import TextStream
from jax_dora.lm.models.tokenizer import TextSettings, prompt_tokens
from jax_dora.quantisation import QTYPE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    add_model_flags(parser, activations=True)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; can be repeated")
    add("--chat", action="store_true", help="format each prompt with the model's chat template")
    add("--system", metavar="TEXT", help="system message; needs --chat")
    variables = "JSON object of variables for the chat template, such as Qwen3's enable_thinking"
    add("--chat-template-kwargs", type=_object, metavar="JSON", help=f"{variables}; needs --chat")
    tokens = in_domain(integers(1, 2**24))
    add("--tokens", type=tokens, default=128, metavar="N", help="maximum number of new tokens")
    add_end_token(add)
    cache = "format of cached keys and values; the model's dtype by default"
    add("--kv-cache", choices=(QTYPE,), help=cache)

    add = parser.add_argument_group("sampling").add_argument
    for name in Sampling.DOMAINS:
        add_setting(add, Sampling, name)


def run(args: argparse.Namespace) -> int:
    """Prints the completions, and returns the exit status."""
    with usage_errors():
        for flag, given in {
            "system": args.system,
            "chat-template-kwargs": args.chat_template_kwargs,
        }.items():
            if given is not None and not args.chat:
                raise ValueError(f"--{flag} is given without --chat; expected both")
        sampling = make_settings(Sampling, args)
        given = {"top-k": args.top_k > 0, "top-p": args.top_p != 1, "min-p": args.min_p}
        for flag, is_given in given.items():
            if is_given and args.temperature == 0:
                raise ValueError(
                    f"--{flag} is given without --temperature; expected a temperature above 0"
                )
        folder = base_folder(args)
        texts = text_settings(args, folder)
        if texts.own:
            print(f"Note: using the {texts.own} in {args.adapter}", file=sys.stderr)
        prompts = args.prompt or [sys.stdin.read()]
        tokens = [_tokens(args, texts, prompt) for prompt in prompts]
        if not all(tokens):
            raise ValueError(
                "--prompt is empty, and the model's tokenizer adds no token at the beginning; "
                "expected a text"
            )
        longest = max(map(len, tokens))
        total = longest + args.tokens
        texts.check_length(
            total, f"--prompt has {longest} tokens and --tokens is {args.tokens}, together {total}"
        )
        model = adapted_model(args, folder)
        if (largest := max(map(max, tokens))) >= (size := model.config.vocab_size):
            raise ValueError(
                f"the tokenizer in {texts.tokenizer_folder} returns token {largest} for --prompt; "
                f"expected less than the model's vocab_size {size}: is it the tokenizer of another "
                "model?"
            )
        if args.adapter is not None:
            model = jax_dora.freeze(model)
    # A reply in a chat is a separate text. Otherwise, the completion continues the prompt.
    streams = [TextStream(texts.tokenizer, before=() if args.chat else ids) for ids in tokens]
    options: dict[str, Any] = {"ends": texts.end_tokens, "kv_cache": args.kv_cache}
    if len(prompts) == 1:
        [stream] = streams
        for (drawn,) in generate_steps(model, tokens, args.tokens, sampling, **options):
            if drawn in texts.end_tokens:
                break
            print(stream.add(int(drawn)), end="", flush=True)
        print(stream.end())
        return 0
    prints_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    answers = generate(model, tokens, args.tokens, sampling, **options)
    for prompt, stream, answer in zip(prompts, streams, answers, strict=True):
        completion = "".join([*map(stream.add, answer), stream.end()])
        line = {"prompt": prompt, "completion": completion}
        print(json.dumps(line, ensure_ascii=not prints_unicode))
    return 0


def _tokens(args: argparse.Namespace, texts: TextSettings, prompt: str) -> list[int]:
    """Returns the tokens of a prompt, formatted as a chat with --chat."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--prompt {prompt!r} is not valid text: {error}") from error
    if not args.chat:
        return prompt_tokens(texts.tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages = [{"role": "system", "content": args.system}, *messages]
    return texts.chat_tokens(messages, args.chat_template_kwargs)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"a": 1}}')
    return value
