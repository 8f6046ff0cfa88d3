"""The buckets of relative positions: each near distance has its own, far ones share them."""

import numpy as np

from jax_dora.lm.encoder.encoder_config import DebertaConfig


def buckets_of(config: DebertaConfig, time: int) -> np.ndarray:
    """Returns i32[2·time - 1], the row of the relative embedding of each distance i - j between
    1 - time and time - 1.

    A distance d below half of the buckets, `mid`, has bucket d. Further ones are in the bucket

        mid + ⌈(mid - 1)·log(d / mid) / log((furthest - 1) / mid)⌉

    which is computed in float32, as in the model's own code: a rounding may decide.
    """
    distance = np.arange(1 - time, time)
    bucket = distance
    if config.position_buckets > 0:
        mid = config.position_buckets // 2
        far = np.maximum(np.abs(distance), mid).astype(np.float32)
        log = np.log(np.append(far, np.float32(config.furthest - 1)) / np.float32(mid))
        log_bucket = np.ceil(log[:-1] / log[-1] * np.float32(mid - 1)) + np.float32(mid)
        is_near = np.abs(distance) <= mid
        bucket = np.where(is_near, distance, log_bucket * np.sign(distance)).astype(np.int64)
    return np.clip(bucket + config.span, 0, 2 * config.span - 1).astype(np.int32)
