"""Answers of vLLM with the plugin, compared with transformers and PEFT in fp32."""

import pytest

from tests.torch_dora.vllm.engines import (
    ADAPTERS,
    MODELS,
    PROMPTS,
    Zoo,
    check,
    engine,
    generate,
    request,
)

pytestmark = [
    pytest.mark.vllm,
    # vLLM and its dependencies warn of themselves.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("kind", MODELS)
def test_every_adapter_alone_and_in_mixed_batches_answers_as_with_peft(kind, tmp_path):
    zoo, names = Zoo(kind, tmp_path), [None, *ADAPTERS]
    requests = {
        name: request(name, name and zoo.path(name), number) for number, name in enumerate(names)
    }
    pairs = [(name, prompt) for prompt in PROMPTS for name in names]
    expected = [zoo.expected(name, tuple(prompt)) for name, prompt in pairs]
    # The adapters are used, and are not all alike.
    assert len({tuple(tokens) for tokens, _ in expected}) > len(pairs) / 2
    # Chunked: the longest prompt takes several steps, and steps mix prompts and answers.
    with engine(zoo.folder, max_num_batched_tokens=32) as made:
        mixed = generate(
            made, [prompt for _, prompt in pairs], [requests[name] for name, _ in pairs]
        )
        check(mixed, expected)
        alone = [generate(made, [prompt], [requests[name]])[0] for name, prompt in pairs[:7]]
        check(alone, expected[:7])
