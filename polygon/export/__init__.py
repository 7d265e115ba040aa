"""Plans in the words of other programs: Chrome trace, DeepSpeed, Megatron-LM, torchtitan, torchrun, SkyPilot."""
