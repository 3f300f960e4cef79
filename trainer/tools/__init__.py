"""What the commands other than `perdure train` do: compare, report, generate, launch, init, doctor,
and the import of DeepSpeed, accelerate and Trainer configurations."""
