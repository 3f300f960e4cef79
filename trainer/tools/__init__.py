"""What people start beside training: compare, report, chaos, generate, import from DeepSpeed,
accelerate and Trainer."""
