"""Generates text with a model, with or without an adapter.

    jax-dora generate --adapter RUN --prompt "12+30="
    jax-dora generate --model FOLDER --chat --prompt "Why is the sky blue?" --temperature 0.7

One prompt's answer is printed as it comes. Several are answered together, and printed as JSON Lines
of "prompt" and "completion". Without --prompt, standard input is the prompt.
"""

import argparse
import json
import sys

import jax_dora
from jax_dora.commands.flags import corrections, not_negative, share, whole
from jax_dora.commands.folders import adapted_model, add_model_flags, base_folder
from jax_dora.models import Sampling, generate, generate_steps, read_config
from jax_dora.models.text import TextStream
from jax_dora.models.tokenizer import Texts


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
        texts = Texts.of(folder, read_config(folder))
        prompts = args.prompt or [sys.stdin.read()]
        tokens = [_tokens(args, texts, prompt) for prompt in prompts]
        if not all(tokens):
            raise ValueError(
                "--prompt is empty, and the model's tokenizer begins texts with nothing"
            )
        longest = max(map(len, tokens))
        together = longest + args.tokens
        told = f"--prompt has {longest} tokens and --tokens is {args.tokens}, together {together}"
        texts.check(together, told)
        model = adapted_model(args, folder)
        if args.adapter is not None:
            model = jax_dora.freeze(model)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    # The answer in a conversation is a text of its own.
    streams = [TextStream(texts.tokenizer, before=() if args.chat else one) for one in tokens]
    if len(prompts) == 1:
        [stream] = streams
        for (drawn,) in generate_steps(model, tokens, args.tokens, sampling):
            if drawn in texts.ends:
                break
            print(stream.add(int(drawn)), end="", flush=True)
        print(stream.end())
        return 0
    prints_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    answers = generate(model, tokens, args.tokens, sampling, ends=texts.ends)
    for prompt, stream, answer in zip(prompts, streams, answers, strict=True):
        completion = "".join([*map(stream.add, answer), stream.end()])
        line = {"prompt": prompt, "completion": completion}
        print(json.dumps(line, ensure_ascii=not prints_unicode))
    return 0


def _tokens(args: argparse.Namespace, texts: Texts, prompt: str) -> list[int]:
    """Returns the tokens of a prompt, or of the conversation that --chat makes of it."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--prompt {prompt!r} is no text: {error}") from error
    if not args.chat:
        return texts.tokenizer.encode(prompt).ids
    if texts.template is None:
        raise ValueError(f"--chat: {texts.folder} has no chat template")
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages = [{"role": "system", "content": args.system}, *messages]
    conversation = texts.template.render(messages, reply=True)
    return texts.tokenizer.encode(conversation, add_special_tokens=False).ids
