"""What people start beside training: compare, report, generate, launch, init, doctor, import from
DeepSpeed, accelerate and Trainer."""
