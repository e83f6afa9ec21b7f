"""Fine-tuning on PEFT and TRL: configurations, data, the default task, the run and its folder."""
