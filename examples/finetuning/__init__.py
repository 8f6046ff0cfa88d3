"""What `finetune.py` is made of."""
