"""The errors that the paper reports and this project promises: no error may be larger."""

from parity.oracle import dtype_name

# The paper's caps (arXiv 2603.22276, the table of its claims); ours have to be at least as tight.
OPERATOR_FP32_MAX_ABS = 1e-4  # fused against plain, fp32, on unit-normal data
D_MAGNITUDE_FP32_MAX_ABS = 2.14e-4  # the same, for the reduction over rows
STABLE_OVER_NAIVE = 3.0  # the naive form's peak error over ours, near g = 1 in bf16/fp16
LOGITS_COSINE = 0.9999  # every model and GPU
TRAINING_MEAN_LOSS_DIFFERENCE = 7.1e-4  # per step, over 2,000 steps
TRAINING_WORST_LOSS_DIFFERENCE = 1.1e-2  # any one step
TRAINING_FINAL_EVAL_DIFFERENCE = 1.5e-4
# The paper's, for bf16 base weights and activations, and what makes them attainable here: a
# residual stream rounded some 7 times a layer carries a relative error of about u·sqrt(7·layers),
# so a token's loss is off by about 2⁻⁷ nat in each framework. Over the 4,096 tokens of a step that
# averages to 2⁻⁷·sqrt(2)/64 = 1.7e-4 for the difference, and its largest of 2,000 to about 3.5
# times as much; the 262,144 tokens of the evaluation leave 2e-5. What is left of the caps is for
# trajectories that part: Adam turns rounding noise in a small gradient into a whole step. How far
# they part by themselves is measured beside it, by moving the initial adapter one ulp.

# The same in fp32, where nothing but the order of sums differs, over tens of steps of a few hundred
# tokens: a loss near 3 is itself stored to 2⁻²³, its terms are off by some ten u32, and Adam's
# whole steps on gradients of the size of their rounding error add as much again.
TRAINING_FP32_MEAN_LOSS_DIFFERENCE = 4e-6
TRAINING_FP32_WORST_LOSS_DIFFERENCE = 2e-5
TRAINING_FP32_FINAL_EVAL_DIFFERENCE = 8e-6

# Between Flax and torch, of a pretrained encoder's unit-length embeddings. In bf16 the paper's own
# figure: two frameworks round the residual stream of six layers independently, a relative
# difference of about 2u = 2^-7 per vector, and 1 - cosine is half its square, 3·10⁻⁵.
EMBEDDING_COSINE = {"bfloat16": LOGITS_COSINE, "float32": 0.9999999}

# What this project promises beyond the paper: between any two of Flax, torch and PEFT.
COSINE = {"bfloat16": 0.99999, "float16": 0.99999, "float32": 0.9999999}

# A whole model, beside PEFT's and beside the model without adapters.
#
# An adapted projection rounds its base product, its two adapter products and its result where the
# unadapted one rounds once, so its errors are at most those of flash-attention's rule: twice as
# large. 1 - cosine is half the square of the relative error, so four times.
MODEL_CONTROL = 4.0
# Ours over PEFT's relative distance from fp64. In bf16 both round as often, or ours less, and what
# is left to chance is the norm of a random vector: of N independent components it strays by
# 1/sqrt(2N). Errors made early reach everything behind them; with N as small as 200, two deviations
# are 10 %. In fp32 the order in which a library sums its matrix products decides (rule 4: with
# `BLOCK` anything from 16 up, the steps vary and the error as their root), and no adapter.
MODEL_NEARNESS = {"bfloat16": 1.1, "float32": 1.5}
# What is allowed, over what the adapter changes: a model in which it changes less shows nothing.
MODEL_RESOLUTION = 0.1


def model_cosine_distance(dtype, control: float) -> float:
    """Returns how far `1 - cosine` of two systems' logits may be from 0: what `COSINE` promises,
    or, where the unadapted models of the two frameworks are themselves further apart than that,
    `control`, `MODEL_CONTROL` times as far.

    Two bf16 models that add up differently round a residual stream of L layers 2L times apart. One
    rounding errs by u/√3 of a spacing's half, about 0.2u of the value in the mean square, so the
    stream alone gives a relative difference of at least 0.3u·sqrt(2L): 1 - cosine of
    0.09 · L · u², 5·10⁻⁵ for 36 layers, before any layer amplifies it. No adapter has a part in it.
    """
    return max(1 - COSINE[dtype_name(dtype)], MODEL_CONTROL * control)
