"""What people start beside training: compare, report, generate, import from DeepSpeed, accelerate
and Trainer."""
