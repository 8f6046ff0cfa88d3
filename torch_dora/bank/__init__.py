"""Many adapters at once: a bank of adapters for one model, and a model whose rows choose among
them."""

from torch_dora.bank.adapter_bank import AdapterBank as AdapterBank
from torch_dora.bank.bank_layers import with_bank as with_bank
