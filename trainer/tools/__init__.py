"""The commands beside training: compare, report, generate, launch, init, doctor, and the imports of
DeepSpeed, accelerate and Trainer configurations."""
