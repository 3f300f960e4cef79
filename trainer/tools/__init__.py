"""What the commands other than `perdure train` do, such as compare, report, watch, replay, eval,
generate, launch, init, doctor, and the import of DeepSpeed, accelerate and Trainer
configurations."""
