"""Serves many adapters at once: a bank of adapters, and models where each row selects one."""

from jax_dora.bank.adapter_bank import AdapterBank as AdapterBank
from jax_dora.bank.bank_layers import BankArray as BankArray
from jax_dora.bank.host import HostAdapter as HostAdapter
from jax_dora.bank.model import DECODING_OPTIONS as DECODING_OPTIONS
from jax_dora.bank.model import with_bank as with_bank
from jax_dora.bank.store import AdapterStore as AdapterStore
from jax_dora.bank.store import SlotsBusy as SlotsBusy
from jax_dora.bank.store import StoredAdapter as StoredAdapter
from jax_dora.ops.bank_linear import MOST_PROMPT_TOKENS as MOST_PROMPT_TOKENS
