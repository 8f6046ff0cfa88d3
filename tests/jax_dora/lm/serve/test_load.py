"""Under load and fault: no wrong adapter, no lost row, no growth."""

import asyncio
import contextlib
import dataclasses
import gc

import jax
import pytest

from tests.jax_dora.lm.serve import load, serving


def expected_texts(server, reference, folders):
    tokenizer = server.service.texts.tokenizer
    prompts = [tokenizer.encode(prompt).ids for prompt in load.PROMPTS]

    def texts(folder):
        return [tokenizer.decode(one) for one in reference.tokens(folder, prompts, load.TOKENS)]

    return {
        name: [set(alike) for alike in zip(*map(texts, versions), strict=True)]
        for name, versions in folders.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "at_a_time", "many", "slots", "host_bytes"),
    [(160, 24, 6, 3, None), (160, 24, 20, 3, 1), (1000, 64, 100, 8, None)],
)
def test_load_and_faults(
    model, settings, reference, tmp_path, record_property, count, at_a_time, many, slots, host_bytes
):
    folder = tmp_path / "adapters"
    for number in range(many):
        serving.write_adapter(model, folder / f"adapter-{number}", number)
    versions = [tmp_path / "versions" / str(one) for one in range(2)]
    for number, version in enumerate(versions):
        serving.write_adapter(model, version, 4 * number + 1000)
    load.put(versions[0], folder / load.SWAPPED)
    changes = {"slots": slots, "queue": at_a_time // 3, "batch": at_a_time // 4}
    changes |= {"host_bytes": host_bytes}
    changed = dataclasses.replace(settings, adapters=folder, **changes)
    with serving.serving(changed) as (server, client):
        folders = {f"adapter-{n}": [folder / f"adapter-{n}"] for n in range(many)}
        folders = {"tiny": [None], load.SWAPPED: versions} | folders
        expected = expected_texts(server, reference, folders)
        assert len({min(one[0]) for one in expected.values()}) > len(expected) // 2
        driver = load.Load(str(client.base_url), expected)

        def serve_once(*names):
            """An adapter's g, taken when a slot first gets it, is kept from then on."""
            for name in names:
                client.completions.create(model=name, prompt="a", max_tokens=1)

        async def half():
            swapping = asyncio.create_task(load.swap(folder, versions, 0.3))
            await driver.run(count // 2, at_a_time)
            swapping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await swapping
            for _ in range(2):  # What two scans find alike is read.
                await asyncio.to_thread(server.adapters.scan)
            # The g of a first load leaves the device with the next load.
            others = [f"adapter-{number}" for number in range(slots)]
            await asyncio.to_thread(serve_once, load.SWAPPED, *others)
            return await settled(server)

        async def halves():
            return await half(), await half()

        serve_once(*folders)
        (arrays, memory), (arrays_after, memory_after) = asyncio.run(halves())
        record_property("printed", str(driver))
        assert driver.wrong == []
        assert driver.counts["answered"] > count // 2
        assert driver.counts["refused with 429"] > 0
        # Only an adapter that has to be read again can be found changed.
        assert host_bytes or not driver.counts["refused with 503"]
        assert (server.metrics.reads._value.get() > 0) is bool(host_bytes)
        assert "damaged-1" in server.adapters.damaged()
        assert len(server.engine.free_rows) == changed.batch
        assert server.engine.waiting == 0
        assert not any(adapter.users for adapter in server.engine._adapters._in_slots)
        assert arrays_after <= arrays
        assert memory_after - memory < 50 * 2**20


async def settled(server):
    """Returns how many arrays and bytes there are once nobody is answered."""
    async with asyncio.timeout(60):
        while len(server.engine.free_rows) < server.settings.batch or server.engine.waiting:
            await asyncio.sleep(0.01)
    gc.collect()
    return len(jax.live_arrays()), load.resident()
