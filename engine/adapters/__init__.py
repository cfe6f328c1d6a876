"""Low-rank adapters (LoRA, Hu et al. 2021): fine-tunes of one base that share its weights."""
