"""DoRA, weight-decomposed low-rank adaptation, for PyTorch.

:func:`apply_dora` replaces layers of an existing model by DoRA layers such as :class:`DoRALinear`.
:mod:`torch_dora.ops` has the functions of tensors that the layers call. :mod:`torch_dora.peft`
reads and writes Hugging Face PEFT folders.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("torch") is None:
    raise ImportError("torch_dora needs PyTorch; install it by pip install 'jax-dora[torch]'")

from dora_common.version import __version__ as __version__
from torch_dora import ops as ops
from torch_dora import peft as peft
from torch_dora.adapt import DoRARule as DoRARule
from torch_dora.adapt import apply_dora as apply_dora
from torch_dora.adapt import coverage as coverage
from torch_dora.adapt import disable_adapters as disable_adapters
from torch_dora.adapt import merge_dora as merge_dora
from torch_dora.adapt import remove_dora as remove_dora
from torch_dora.adapt import to_lora as to_lora
from torch_dora.bank import AdapterBank as AdapterBank
from torch_dora.bank import with_bank as with_bank
from torch_dora.layers import DoRAConv as DoRAConv
from torch_dora.layers import DoRAConv1D as DoRAConv1D
from torch_dora.layers import DoRAEmbedding as DoRAEmbedding
from torch_dora.layers import DoRAExperts as DoRAExperts
from torch_dora.layers import DoRALayer as DoRALayer
from torch_dora.layers import DoRALinear as DoRALinear
from torch_dora.norms import freeze as freeze
from torch_dora.norms import norms as norms
from torch_dora.norms import reset_magnitudes as reset_magnitudes
from torch_dora.norms import with_norms as with_norms
