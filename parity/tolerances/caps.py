"""Limits for whole results: errors that the paper reports or that this project promises not to
exceed."""

from parity.oracle import dtype_name

# The paper's limits (arXiv 2603.22276, table of claims). Ours must be at least as tight.
OPERATOR_FP32_MAX_ABS = 1e-4  # fused against plain, fp32, on unit-normal data
D_MAGNITUDE_FP32_MAX_ABS = 2.14e-4  # the same, for the reduction over rows
STABLE_OVER_NAIVE = 3.0  # peak error of the naive form / ours, near g = 1 in bf16/fp16
LOGITS_COSINE = 0.9999  # every model and GPU
TRAINING_MEAN_LOSS_DIFFERENCE = 7.1e-4  # per step, over 2,000 steps
TRAINING_WORST_LOSS_DIFFERENCE = 1.1e-2  # any one step
TRAINING_FINAL_EVAL_DIFFERENCE = 1.5e-4
# The three limits above are the paper's, for bf16 base weights and activations. Why they are
# attainable here: a residual stream that is rounded about 7 times per layer has a relative error of
# about u·sqrt(7·layers), so in each framework a token's loss is off by about 2⁻⁷ nat. Averaged over
# the 4,096 tokens of a step, the difference of the two losses is about 2⁻⁷·sqrt(2)/64 = 1.7e-4, and
# its maximum over 2,000 steps about 3.5 times that; for the 262,144 tokens of the evaluation it is
# 2e-5. The rest of each limit allows for diverging trajectories: Adam turns rounding noise in a
# small gradient into a full step. This divergence is also measured, by moving the initial adapter
# by one ulp.

# The same limits in fp32, where only the order of sums differs, over tens of steps of a few hundred
# tokens: a loss near 3 is stored with an error of 2⁻²³, its terms are off by about ten u32, and
# Adam's full steps on gradients as small as their rounding error add as much again.
TRAINING_FP32_MEAN_LOSS_DIFFERENCE = 4e-6
TRAINING_FP32_WORST_LOSS_DIFFERENCE = 2e-5
TRAINING_FP32_FINAL_EVAL_DIFFERENCE = 8e-6

# What this project promises beyond the paper: the cosine between any two of Flax, torch and PEFT.
COSINE = {"bfloat16": 0.99999, "float16": 0.99999, "float32": 0.9999999}

# A whole model, compared with PEFT's and with the model without adapters.
# An adapted projection rounds its base product, its two adapter products and its result, where the
# unadapted one rounds once. By flash-attention's rule its errors are at most twice as large. 1 -
# cosine is half the square of the relative error, so four times as large.
MODEL_CONTROL = 4.0
# The ratio of our relative distance from fp64 to PEFT's. In bf16 our model rounds as often as
# PEFT's or less often, so the ratio varies only by chance, like the norm of a random vector: with N
# independent components it varies by 1/sqrt(2N). Early errors affect everything after them; with N
# as small as 200, two deviations are 10 %. In fp32 the order of sums in a library's matrix products
# matters (rule 4: with any `BLOCK` of at least 16, the number of steps varies, and the error with
# its square root), not the adapter.
MODEL_NEARNESS = {"bfloat16": 1.1, "float32": 1.5}
# The allowed distance / the distance that the adapter causes: if the adapter changed the logits
# less, the comparison would show nothing.
MODEL_RESOLUTION = 0.1


def model_cosine_distance(dtype, control: float) -> float:
    """Returns the limit for `1 - cosine` of two systems' logits.

    The limit is `1 - COSINE`, or `MODEL_CONTROL * control` if that is larger, and at most the
    paper's; `control` is the distance between the unadapted models of the two frameworks.

    Two bf16 models with different orders of sums round a residual stream of L layers 2L times
    independently. One rounding has a root mean square error of u/√3 of half a spacing, about 0.2u
    of the value. So the stream alone gives a relative difference of at least 0.3u·sqrt(2L), that is
    1 - cosine = 0.09 · L · u², 5·10⁻⁵ for 36 layers, before any layer amplifies it. The adapter
    does not contribute to this.
    """
    limit = max(1 - COSINE[dtype_name(dtype)], MODEL_CONTROL * control)
    return min(limit, 1 - LOGITS_COSINE)
