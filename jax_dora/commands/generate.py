"""Generates text with a model, with or without an adapter.

    jax-dora generate --adapter RUN --prompt "12+30="
    jax-dora generate --model FOLDER --chat --prompt "Why is the sky blue?" --temperature 0.7

One prompt's answer is printed as it comes. Several are answered together, and printed as JSON Lines
of "prompt" and "completion". Without --prompt, standard input is the prompt.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax_dora
from jax_dora.commands.flags import corrections, not_negative, share, whole
from jax_dora.commands.folders import adapted_model, add_model_flags, base_folder
from jax_dora.models import Sampling, generate, generate_steps, read_config
from jax_dora.models.chat import ChatTemplate
from jax_dora.models.config import max_positions
from jax_dora.models.text import TextStream
from jax_dora.models.tokenizer import read_ends, read_tokenizer


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", action="append", help="what to go on from; may be given several times")
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add("--system", help="with --chat: the system's message")
    add("--tokens", type=whole(1, 2**24), default=128, help="at most so many new (%(default)s)")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=not_negative, default=0.0, help="0 takes the likeliest (%(default)s)")
    add("--top-k", type=whole(0), default=0, help="of so many likeliest; 0 for all (%(default)s)")
    add("--top-p", type=share, default=1.0, help="of the likeliest of this share (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the draws (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints what the model says; returns the exit status."""
    with corrections():
        if args.system is not None and not args.chat:
            raise ValueError("--system is given without --chat, whose template has a place for it")
        for flag, changes in {"top-k": args.top_k != 0, "top-p": args.top_p != 1}.items():
            if changes and args.temperature == 0:
                raise ValueError(f"--{flag} is given without --temperature above 0, which samples")
        folder = base_folder(args)
        config = read_config(folder)
        tokenizer, ends = read_tokenizer(folder), read_ends(folder, config)
        prompts = args.prompt or [sys.stdin.read()]
        for prompt in prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"--prompt {prompt!r} is no text: {error}") from error
        if args.chat:
            texts = [_conversation(folder, args.system, prompt) for prompt in prompts]
        else:
            texts = prompts
        tokens = [tokenizer.encode(one, add_special_tokens=not args.chat).ids for one in texts]
        if not all(tokens):
            raise ValueError(
                "--prompt is empty, and the model's tokenizer begins texts with nothing"
            )
        longest, most = max(map(len, tokens)), max_positions(config)
        if most is not None and longest + args.tokens > most:
            raise ValueError(
                f"--prompt has {longest} tokens and --tokens is {args.tokens}, together "
                f"{longest + args.tokens}; expected at most config.json's max_position_embeddings "
                f"{most}"
            )
        model = adapted_model(args, folder)
        if args.adapter is not None:
            model = jax_dora.freeze(model)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)

    def stream_of(prompt: Sequence[int]) -> TextStream:
        """Returns what makes text of an answer: a conversation's is a text of its own."""
        return TextStream(tokenizer, before=() if args.chat else prompt)

    if len(prompts) == 1:
        stream = stream_of(tokens[0])
        for (drawn,) in generate_steps(model, tokens, args.tokens, sampling):
            if drawn in ends:
                break
            print(stream.add(int(drawn)), end="", flush=True)
        print(stream.end())
        return 0
    answers = generate(model, tokens, args.tokens, sampling, ends=ends)
    for prompt, read, answer in zip(prompts, tokens, answers, strict=True):
        stream = stream_of(read)
        completion = "".join([*map(stream.add, answer), stream.end()])
        print(json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False))
    return 0


def _conversation(folder: Path, system: str | None, prompt: str) -> str:
    template = ChatTemplate.of(folder)
    if template is None:
        raise ValueError(f"--chat: {folder} has no chat template")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return template.render(messages, reply=True)
